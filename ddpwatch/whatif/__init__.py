"""What if: the step time under another setting, worked out from the full steps of a run.

`recorded` collects what a run shows, `assignment` rebuilds DDP's buckets, `cost` fits what a collective takes, `model`
takes a run apart into work and waiting, `schedule` plays one step, `scenarios` are the changes and `answer` puts them
together. ``docs/whatif.md`` says what is modelled, and what is assumed.
"""
