"""Functions of ddpwatch's that may not raise when they are entered: they are the guard, or only pass on."""

DOORS = {
    "probe.guard:Guard.run": "the guard",
    "probe.guard:Guard.failed": "the guard",
    "probe.guarded:GuardedProbe._guarded.<locals>.guarded": "the guard",
    "probe.calls:SeenCalls.tell": "the guard of calls that are seen",
    "probe.calls:_wrapper.<locals>.seen_call.<locals>.named": "a generator, read by that guard; its end is a call, too",
    "probe.calls:_arguments": "the same",
    "probe.calls:_on_start": "passes on to it",
    "probe.calls:_on_return": "passes on to it",
    "probe.calls:_on_unwind": "passes on to it",
    "probe.calls:_wrapper.<locals>.seen_call": "calls the job's function",
    "probe.activity:_when_imported.<locals>.hook": "passes on to the guard",
    "probe.ddp_collectives:GroupHooks._guarded": "passes on to the guard",
    "probe.comm_hooks:_patch_registration.<locals>.register_comm_hook": "calls torch's method",
    "probe.comm_hooks:timed.<locals>.ddpwatch_timing": "calls the job's comm hook",
    "probe.own_collectives:OwnCollectiveProbe._before": "the guard of process groups' hooks",
    "probe.known_group:GroupHook._before": "passes on to that one",
    "probe.optimizer_steps:_tell": "the guard of optimizer steps",
    "probe.ddp_timed_group:TimedGroup.allreduce": "calls the job's process group",
    "probe.ddp_timed_group:_passed_on.<locals>.method": "calls the job's process group",
    "probe.watch:count": "passes on to the guard",
    "probe.watch:mark": "passes on to the guard",
    "probe.session:ProbeSession.close": "called by the guard, or by a test",
    "probe.sharded_comm:TimedAllGather.__call__": "calls FSDP2's object",
    "probe.sharded_comm:TimedReduceScatter.__call__": "calls FSDP2's object",
    "probe.sharded_comm:TimedReduceScatter.allocate": "calls FSDP2's object",
    "probe.sharded_comm:TimedComm._self_issue": "calls FSDP2's object",
}
# Where Python keeps to itself what a signal handler raises: in a collection, and at the end of an object's life. And
# what runs on a thread of ddpwatch's, where no signal handler does.
NOT_FOR_SIGNALS = (
    "probe.gc_pauses:", "probe.ddp:DdpProbe._done", "probe.recorder:StepRecorder.bucket_done",
    "run.blackbox:BlackBox.done", "probe.forwards:SeenForwards.close", "probe.forwards:SeenForwards.forget_buffers",
    "probe.comm_hooks:_end_with_the_last",
)  # fmt: skip
