"""The probe: hooks, stamps and one frame per step, in the training process. Besides it, only own jobs import torch."""
