"""Our own sections, and the whole config of a run."""

from __future__ import annotations

from typing import Literal

from elastic_train.config.section import (
    Count,
    Decay,
    Fraction,
    Name,
    NonNegative,
    Port,
    Positive,
    PositiveInt,
    Strings,
    section,
)
from elastic_train.config.titan_schema import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ExperimentalConfig,
    FaultToleranceConfig,
    JobConfig,
    LRSchedulerConfig,
    MemoryEstimationConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    ProfilingConfig,
    QuantizeConfig,
    TrainingConfig,
    ValidationConfig,
)


@section
class OrchestratorConfig:
    """How many replicas there are and how a run begins and ends."""

    replicas: PositiveInt = 2
    """Copies of the model that train side by side and come together at each outer sync."""

    procs_per_replica: PositiveInt = 1
    """Processes of one replica, its ranks: one per accelerator."""

    start_timeout_s: Positive = 300.0
    """How long the start waits for replicas to be ready; those that are not come later and get their state
    from a peer."""

    finish_timeout_s: Positive = 60.0
    """How long the others get once the first replica has trained to the end."""

    advertise_host: str = ""
    """Address of this machine, under which other hosts reach it; empty: loopback with the local scheduler, else the
    one from which this machine reaches the first of scheduler.hosts."""

    drain_timeout_s: NonNegative = 60.0
    """How long an interrupted run trains on to its next sync, before what was trained since the last one is given up
    and the state of that one is written."""


@section
class LighthouseConfig:
    """The quorum service, which knows who is alive."""

    address: str = ""
    """A Lighthouse that somebody else runs, as http://host:port; empty: the run starts its own."""

    host: str = ""
    """Address at which our Lighthouse and the registry of the replicas listen, and under which replicas reach them;
    empty: that of orchestrator.advertise_host."""

    port: Port = 0
    """Port at which our Lighthouse listens; 0: any that is free."""

    min_replicas: PositiveInt = 1
    """Fewest replicas that may go on together."""

    join_timeout_ms: PositiveInt = 600_000
    """How long a quorum waits for replicas that live but have not asked for it; it must cover two intervals.
    """

    heartbeat_timeout_ms: PositiveInt = 5000
    """Silence after which a replica counts as dead, in the Lighthouse's eyes."""

    quorum_tick_ms: PositiveInt = 100
    """How often the Lighthouse looks whether a quorum is ready."""

    silence_timeout_s: Positive = 10.0
    """How long our Lighthouse, or the registry, may leave questions unanswered before its process counts as hanging,
    and is ended and started again."""

    restarts: Count = 5
    """How often the process of our Lighthouse and the registry is started again at its address before the run ends.
    recovery.forgive_after_s without a loss takes one off the count, and recovery.backoff_* give the pauses."""


@section
class DilocoConfig:
    """The outer sync: how replicas average what they learned."""

    engine: Literal["elastic", "torchft"] = "elastic"
    """What carries the sync out: our own, in which a replica that dies costs the others no inner step, or torchft's
    DiLoCo, which goes back to the last sync if one fails."""

    sync_every: PositiveInt = 20
    """Inner steps from one outer sync to the next."""

    interval: Literal["steps", "time"] = "steps"
    """What an interval is to replicas of different speed: the same number of inner steps for each, or the same time,
    so that nobody waits; sync_every is then the mean."""

    weighting: Literal["tokens", "uniform"] = "tokens"
    """How much a replica counts in the average: by the tokens that it trained since the last sync, or as much as any
    other."""

    outer_lr: Positive = 0.7
    """Learning rate of the outer optimizer, which is SGD on the averaged pseudo-gradient."""

    outer_momentum: Decay = 0.9
    """Momentum of the outer optimizer."""

    outer_nesterov: bool = True
    """Look ahead along the momentum, as Nesterov does."""

    outer_weight_decay: NonNegative = 0.0
    """How strongly the outer optimizer pulls weights to zero."""

    fragments: PositiveInt = 1
    """Parts of the model that sync one after the other, spread over the interval."""

    overlap_steps: Count = 0
    """Inner steps that go on beside a sync before its result is taken in."""

    merge_alpha: Fraction = 0.0
    """How much of its own parameters a replica keeps when it takes the result in; 0: nothing."""

    compression: Literal["none", "bf16", "int8", "int4"] = "none"
    """What the numbers that replicas exchange are rounded to on the way; what rounding loses is added to the next
    exchange."""

    bucket_mb: PositiveInt = 32
    """Megabytes that go over the wire in one operation; larger ones are faster and take more memory."""

    anchor_device: Literal["host", "device"] = "host"
    """Where the anchor and the outer optimizer live: in the host's memory, or on the accelerator, which is faster and
    takes 16 bytes there for each parameter of a rank."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What replicas talk over: nccl (RCCL on AMD), gloo, or what fits the device."""

    timeout_s: Positive = 60.0
    """Bound on one operation between replicas."""

    quorum_timeout_s: Positive = 3600.0
    """Bound on the wait for a quorum; a request is meant to stay pending, so it is long."""

    connect_timeout_s: Positive = 10.0
    """Bound on connecting to the Lighthouse or to a peer's manager."""

    quorum_retries: Count = 36000
    """How often engine = "torchft" repeats a request to the Lighthouse that failed, as while it is restarted; our own
    engine repeats it for as long as diloco.quorum_timeout_s allows."""

    manager_port: Port = 0
    """Port of each replica's torchft manager; 0: any that is free."""

    max_retries: Count = 10
    """Failed syncs in a row that a replica bears before it restarts."""


@section
class PeerCkptConfig:
    """How a returning replica gets its state from a living one."""

    transport: Literal["tcp", "process_group", "http"] = "tcp"
    """What carries the state: our own wire; the same with the bytes in process groups of the collective library that
    ``diloco.backend`` comes to, which may use RDMA and does not encrypt; or torchft's, which
    ``diloco.engine = "torchft"`` uses and no other."""

    timeout_s: Positive = 300.0
    """Bound on receiving the whole state."""

    idle_timeout_s: Positive = 10.0
    """How long a donor may send nothing before another takes its place."""

    donors: PositiveInt = 2
    """Peers that give a joiner its state together. At most 8."""

    streams: PositiveInt = 2
    """Connections to each donor. At most 16."""

    snapshots: PositiveInt = 2
    """Outer steps that a rank can be asked for at the same time, 1 or 2: with 1 a joiner must have the moments of the
    inner optimizer within one interval, with 2 within two. Each costs the host memory of those moments."""

    shared_memory: bool = True
    """Let a rank's host copies outlive its process in memory that its supervisor holds: if no peer has a newer outer
    step, the next incarnation on that host takes its state from there and not over the network. So the memory of a
    process that has ended is free again only when the next one has its state."""

    http_chunks: Count = 0
    """Parts in which torchft's transport fetches the state at the same time; 0: in one piece."""

    advertise_host: str = ""
    """Name or address at which this machine listens for peers, and under which they reach it, with the local scheduler;
    empty: loopback. With others, each host has its own."""

    tls_certificate: str = ""
    """PEM file with the certificate that every process shows; empty: what peers send each other is not encrypted."""

    tls_key: str = ""
    """PEM file with its private key."""

    tls_authority: str = ""
    """PEM file with the certificate of the authority that must have signed the other side's."""


@section
class RecoveryConfig:
    """What happens to a replica that fails, from the least to the most."""

    restarts_in_place: Count = 5
    """Restarts on the same host before a new allocation is asked for."""

    reallocations: Count = 2
    """New allocations before the replica is given up; with the local scheduler they are on the same host, with others
    on one that has not failed, if there is one."""

    restores: Count = 3
    """How often all replicas may go back to the last durable snapshot together, once none of them holds the state any
    more; 0: the run then ends. Healthy running takes one off the count only once there is a newer snapshot."""

    forgive_after_s: Positive = 60.0
    """Seconds of healthy running that take one failure off the count."""

    same_error_limit: PositiveInt = 3
    """The same error at the same step this often in a row is not restarted again."""

    backoff_initial_s: NonNegative = 0.5
    """Pause before the second restart; it doubles with each further one."""

    backoff_max_s: NonNegative = 30.0
    """Longest pause before a restart."""

    backoff_jitter: Fraction = 0.2
    """Part of the pause that is left to chance, so that replicas do not come back in step."""

    standby: bool = True
    """Keep processes with everything imported beside each replica, which take over when its own have failed. They take
    host memory (about 0.6 GiB for each rank) and none of an accelerator."""

    hang_timeout_s: Positive = 90.0
    """A rank that needs longer than this for an inner step, or for one operation of a sync, counts as hanging: where
    its threads stand is written down, and its replica is restarted."""

    start_hang_timeout_s: Positive = 600.0
    """The same for a rank's start: imports, model and data, and in a joiner receiving its state."""

    first_step_hang_timeout_s: Positive = 600.0
    """The same for the first inner step of a process, which compiles the model if compile.enable."""

    evaluate_hang_timeout_s: Positive = 300.0
    """The same for an evaluation."""

    save_hang_timeout_s: Positive = 600.0
    """The same for a durable snapshot: its copy to the host, and at the end of a run also writing it."""

    silence_timeout_s: Positive = 15.0
    """A process whose heartbeat thread is silent for so long is stopped or holds the interpreter's lock, and counts as
    hanging whatever it is doing; until its first inner step is done it gets four times as long."""

    host_timeout_s: Positive = 10.0
    """A host other than this one that answers nothing for so long is lost: its replicas have failed."""

    isolation_timeout_s: Positive = 25.0
    """A replica on another host that has not heard from the controller for so long ends itself, with all its processes.
    Its slot is not started elsewhere before that must have happened."""

    preemption_grace_s: NonNegative = 20.0
    """How long a replica trains on to its next sync after a process of it was told by SIGTERM that its host is about to
    be taken away; if the sync is farther off, it ends at once. Must be shorter than the scheduler's own grace."""

    stop_timeout_s: Positive = 10.0
    """How long a process gets to end by itself before it is killed."""


@section
class FaultsConfig:
    """Faults that are injected, to see the run survive them."""

    at: Strings = ()
    """Faults at given places, each replica.rank@step[/point]:kind, as in 0.1@25:kill."""

    every_s: NonNegative = 0.0
    """Seconds from one random fault to the next, on average; 0: none."""

    kinds: Strings = ("kill",)
    """Kinds that random faults are drawn from."""

    seed: Count = 0
    """Where the random faults start; the same seed draws the same faults, of which those for a replica that is
    not training are left out."""


@section
class SchedulerConfig:
    """Who gives the hosts."""

    kind: Literal["local", "ssh"] = "local"
    """local: all replicas on this machine; ssh: on scheduler.hosts, which a remote shell reaches."""

    hosts: Strings = ()
    """Hosts for the replicas, each a name or an address, with user@ before it if need be."""

    replicas_per_host: Count = 0
    """Most replicas on one host at a time, which share its cores and accelerators; 0: so many that all fit on all
    hosts, evenly. With more places than replicas there are hosts in reserve."""

    ssh_command: Name = "ssh -o BatchMode=yes"
    """Remote shell: it is called with a host and a command for the shell there. What it is given as input must reach
    the command, and end there when it ends here."""

    python: str = ""
    """Interpreter on the hosts, in whose environment the same elastic_train is installed; empty: the path of the one
    that runs here."""

    start_timeout_s: Positive = 60.0
    """How long a host may take to start what gives it processes, before another is tried."""

    cool_down_s: NonNegative = 60.0
    """How long a host that has failed is left alone, unless no other is free."""


@section
class RunConfig:
    """Everything that a run is told: torchtitan's sections first, then ours."""

    job: JobConfig = JobConfig()
    """What this run is called and where it writes."""

    profiling: ProfilingConfig = ProfilingConfig()
    """Traces of where time and memory go."""

    metrics: MetricsConfig = MetricsConfig()
    """What is measured while training and where it is shown."""

    model: ModelConfig = ModelConfig()
    """Which model is trained."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The inner optimizer, which every replica steps by itself."""

    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    """How the inner learning rate moves over the run."""

    training: TrainingConfig = TrainingConfig()
    """What one inner step is and how many there are."""

    parallelism: ParallelismConfig = ParallelismConfig()
    """How the ranks of one replica share the work."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durable snapshots on disk."""

    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    """Computing activations again in the backward pass."""

    compile: CompileConfig = CompileConfig()
    """torch.compile."""

    quantize: QuantizeConfig = QuantizeConfig()
    """Low-precision training."""

    comm: CommConfig = CommConfig()
    """Communication between the ranks of one replica."""

    memory_estimation: MemoryEstimationConfig = MemoryEstimationConfig()
    """torchtitan's estimate of memory."""

    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    """torchtitan's torchft settings."""

    experimental: ExperimentalConfig = ExperimentalConfig()
    """torchtitan's hooks for code of one's own."""

    validation: ValidationConfig = ValidationConfig()
    """Evaluation in the course of training."""

    debug: DebugConfig = DebugConfig()
    """For finding out what goes wrong, and for tests."""

    orchestrator: OrchestratorConfig = OrchestratorConfig()
    """How many replicas there are and how a run begins and ends."""

    lighthouse: LighthouseConfig = LighthouseConfig()
    """The quorum service."""

    diloco: DilocoConfig = DilocoConfig()
    """The outer sync."""

    peer_ckpt: PeerCkptConfig = PeerCkptConfig()
    """How a returning replica gets its state."""

    recovery: RecoveryConfig = RecoveryConfig()
    """What happens to a replica that fails."""

    faults: FaultsConfig = FaultsConfig()
    """Faults that are injected."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """Who gives the hosts."""

    @property
    def replicas_per_host(self) -> int:
        """Most replicas that share a host."""
        if self.scheduler.kind == "local":
            return self.orchestrator.replicas
        return self.scheduler.replicas_per_host or -(-self.orchestrator.replicas // max(1, len(self.scheduler.hosts)))

    @property
    def data_parallel_degree(self) -> int:
        """Ranks of one replica that read different data; the shard degree -1 takes what the other degrees
        leave."""
        degrees = self.parallelism
        return degrees.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def data_parallel_shard_degree(self) -> int:
        """Ranks over which a replica's parameters are sharded, with -1 resolved."""
        degrees = self.parallelism
        if degrees.data_parallel_shard_degree != -1:
            return degrees.data_parallel_shard_degree
        others = (
            degrees.data_parallel_replicate_degree
            * degrees.tensor_parallel_degree
            * degrees.pipeline_parallel_degree
            * degrees.context_parallel_degree
        )
        return max(1, self.orchestrator.procs_per_replica // others)
