"""The probe: hooks, stamps and one frame per step, in the training process. Only jobs of our own import torch, too."""
