"""The probe: hooks, stamps and one frame per step, in the training process. Only here torch is imported."""
