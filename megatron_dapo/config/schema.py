"""What a run is: every key of a configuration file, with unit, source and reason.

The documentation string below a field is its documentation everywhere: in errors, in the
generated reference and in editors. Checks that need two fields live in `config.checks`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.algorithm import AdvantageConfig, CriticConfig, LossConfig, RewardConfig
from megatron_dapo.config.checkpoint import CheckpointConfig
from megatron_dapo.config.evaluation import EvaluationConfig
from megatron_dapo.config.section import (
    LONGEST_SECONDS,
    MOST,
    Coefficient,
    Fraction,
    LearningRate,
    LocalPath,
    NaturalInt,
    PositiveInt,
    PromptFormat,
    Ranks,
    Seconds,
    Section,
    Temperature,
    WholeSeconds,
)


class ModelConfig(Section):
    """The policy's starting point: a Hugging Face folder."""

    path: LocalPath
    """Folder with config.json, safetensors and tokenizer. Its config.json gives every shape."""
    tokenizer: LocalPath | None = None
    """Tokenizer folder or SentencePiece .model file; default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of parameters and activations. bfloat16 keeps fp32 main gradients and fp32 masters."""
    trust_remote_code: bool = False
    """Run Python that ships inside the model folder. Off: such a folder is refused."""


class ParallelConfig(Section):
    """How ranks are cut: world size = tensor x pipeline x context x data."""

    tensor: Ranks = 1
    """Ranks that share each layer (TP)."""
    pipeline: Ranks = 1
    """Stages that share the depth (PP)."""
    virtual_pipeline: Ranks | None = None
    """Model chunks a stage (interleaved schedule); needs pipeline >= 2."""
    context: Ranks = 1
    """Ranks that share each sequence (CP)."""
    data: Ranks = 1
    """Copies of the model that split each update (DP)."""
    expert: Ranks = 1
    """Ranks that share the experts of an MoE layer (EP); taken out of tensor x context x data."""
    expert_tensor: Ranks | None = None
    """Tensor parallelism inside an expert; default 1 when expert > 1, else `tensor`."""
    sequence_parallel: bool | None = None
    """Split activations between tensor ranks; default: on when tensor > 1."""
    distributed_optimizer: bool = True
    """Shard fp32 masters and Adam moments over the data-parallel ranks."""
    nodes: Ranks = 1
    """Machines. More than one: started by srun or torchrun, one task per device."""
    timeout_seconds: WholeSeconds = 600
    """Longest wait inside one training collective. Waiting for rollouts has its own limit."""
    stall_seconds: int = Field(default=1800, ge=0, le=LONGEST_SECONDS)
    """Once no rank has begun an update or a phase, nor received a response, for so long, all write
    their stacks into run_dir/logs/stacks and the run ends. 0: off."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def uses_sequence_parallel(self) -> bool:
        return self.tensor > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def expert_tensor_size(self) -> int:
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor


class PrecisionConfig(Section):
    """FP8 layers of Transformer Engine; without it, asking for them is an error."""

    fp8: Literal["none", "blockwise", "tensorwise", "delayed", "mxfp8"] = "none"
    """Recipe. blockwise: Hopper. mxfp8: Blackwell. tensorwise and delayed: both."""
    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    """hybrid keeps gradients in e5m2 (delayed, tensorwise)."""
    fp8_param_gather: bool = False
    """Keep the parameters themselves in FP8, so data-parallel gathers move half the bytes."""
    first_last_layers_bf16: bool = False
    """First and last layer stay in BF16 (tensorwise, blockwise)."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one rank's shard of a pack come in multiples of this."""
        return {"none": 1, "tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}[self.fp8]


class TrainingConfig(Section):
    """The update: how many responses, how they are packed, and memory against compute."""

    steps: PositiveInt = 400
    """Rollout steps of the run."""
    responses_per_update: PositiveInt = 512
    """Responses (not prompts) of one update. DAPO 4.1: 512 of 8,192, 16 updates a step."""
    epochs: PositiveInt = 1
    """Passes over each rollout batch."""
    tokens_per_micro_batch: PositiveInt = 22528
    """Most tokens in one packed micro-batch of one data-parallel rank (all its context ranks).
    At least the longest prompt + response; the released script: 22,528 = 2,048 + 20,480."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: core attention only, or whole layers."""
    stop_after_skipped: PositiveInt = 3
    """Updates in a row skipped for a non-finite gradient after which the run stops."""
    deterministic: bool = True
    """Same seed, same layout: same weights."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass still runs (GPU)."""


class MoeConfig(Section):
    """Mixture-of-experts training. Read only for MoE models."""

    aux_loss_coef: Coefficient = 0.0
    """Load-balancing loss; 0 leaves routing to the policy gradient."""
    z_loss_coef: Coefficient = 0.0
    """Keeps router logits small."""
    grouped_gemm: bool | None = None
    """One kernel for all local experts; default: on where Transformer Engine is in use."""


class OptimizerConfig(Section):
    """AdamW. Defaults are DAPO's (4.1 and the released script)."""

    lr: LearningRate = 1e-6
    """Constant after warm-up."""
    warmup_steps: NaturalInt = 20
    """Rollout steps (not updates) of linear warm-up; the scheduler moves once a rollout step."""
    weight_decay: float = Field(default=0.1, ge=0.0, le=100.0)
    """Decoupled; not applied to biases and norms."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, ge=1e-20, le=1.0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=1e-6, le=1e9)
    """Global gradient norm above which the gradient is scaled down."""


class DataConfig(Section):
    """Prompts as parquet or JSONL, in DAPO-Math-17k's row format or a benchmark's own."""

    train: LocalPath
    """.parquet or .jsonl file."""
    heldout: LocalPath | None = None
    """Prompts of the evaluation inside the loop; `evaluation.sets` names more."""
    prompt_format: PromptFormat = "dapo"
    """dapo: the paper's instruction around the bare problem (left alone where it is already
    there). chat: the tokenizer's chat template. plain: the text as it stands."""
    prompt_column: str | None = None
    """Column with the text or the list of messages; default: recognised from the columns."""
    answer_column: str | None = None
    """Column with the answer, dots go into nested objects; default: recognised (docs/data.md)."""
    max_prompt_tokens: PositiveInt = 2048
    """Template included."""
    overlong_prompts: Literal["drop", "truncate_left", "error"] = "drop"
    """A prompt over max_prompt_tokens. drop: counted. truncate_left: the released script's."""
    bad_rows: Literal["error", "skip"] = "error"
    """A row that cannot be read: stop with its line number, or count it and go on."""
    deduplicate: bool = True
    """Keep the first of rows with the same prompt text (DAPO-Math-17k repeats each ~100 times)."""


class RolloutConfig(Section):
    """Sampling by stock vLLM servers."""

    prompts_per_step: PositiveInt = 512
    """Groups that one rollout step trains on. DAPO 4.1: 512."""
    group_size: PositiveInt = 16
    """Responses a prompt, G. DAPO 4.1: 16."""
    temperature: Temperature = 1.0
    """The trainer divides its logits by it too. 0 has no gradient: refused for training."""
    top_p: float = Field(default=1.0, ge=1e-6, le=1.0)
    """Share of the probability mass that is sampled from; training takes only 1."""
    top_k: int = Field(default=-1, ge=-1, le=MOST)
    """-1: off. Training takes only untruncated distributions, else log-probs would not match."""
    max_response_tokens: PositiveInt = 20480
    """L_max of DAPO Eq. 13."""
    logprobs: Literal["processed", "raw"] = "processed"
    """Which log-probs the engine returns: of the sampling distribution, or of the raw logits."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """How far sampling runs ahead of training. sync: not at all. one_step_off: the next step is
    sampled while this one is trained on. async: sampling goes on through training and updates.
    Both need loss.mismatch and, on GPU, engines with their own devices."""
    max_staleness: PositiveInt = 1
    """Most versions that the oldest token of a trained response may be behind the weights that
    train on it; with mode=async or sampling.surplus=carry."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Engines share the trainers' devices (sleep and wake), or have their own."""
    engines: Ranks = 1
    """Replicas that trainer rank 0 starts on its machine; with `endpoints`, how many are given."""
    engine_tensor: Ranks = 1
    """Tensor parallelism of one engine."""
    endpoints: tuple[str, ...] = ()
    """Running servers (unix:/path or http://127.0.0.1:port) instead of starting our own."""
    engine_nodes: int = Field(default=0, ge=0, le=65_536)
    """Machines for engines beside `parallel.nodes`: examples/qwen32b/run.sh starts `engines` there,
    evenly, and fills in `endpoints`. 0: trainer rank 0 starts them on its machine."""
    remote_engines: bool = False
    """Consent to engines with a port, http://host:port. Each request to them needs the token of
    `token_file`, but prompts, responses and the token itself cross the network unencrypted: only
    for a network whose users you trust."""
    token_file: LocalPath | None = None
    """File of mode 600 with the token of engines with a port; run.sh writes a new one each time."""
    engine_dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """auto: `model.dtype`."""
    engine_quantization: Literal["fp8"] | None = None
    """fp8: engines hold the matrices of the layers in e4m3 with a scale for each 128 x 128 block.
    Updates bring each rank its own values and scales: the trainers quantise."""
    max_engine_tokens: PositiveInt | None = None
    """Longest prompt + response of the engine; default: the sum of both limits."""
    max_concurrent_sequences: PositiveInt = 256
    """Sequences that one engine decodes at once."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of an engine's GPU memory for weights and KV cache. Not read on CPU."""
    cpu_kv_cache_gib: int = Field(default=1, gt=0, le=65_536)
    """KV cache of an engine on CPU. Not read on GPU."""
    startup_timeout_seconds: WholeSeconds = 600
    """Longest wait for an engine to load its weights and answer."""
    request_timeout_seconds: WholeSeconds = 3600
    """Longest wait for one response."""
    heartbeat_seconds: Seconds = 5.0
    """Between two questions to each engine whether it lives."""
    heartbeat_timeout_seconds: Seconds = 60.0
    """An engine that answers none for this long hangs: it is killed and its requests go elsewhere.
    Must be longer than one step of the model over its longest prompts."""
    max_restarts: int = Field(default=3, ge=0, le=10_000)
    """Times that an engine may be restarted (one of `endpoints`: waited for) after it was lost,
    after 1, 2, 4 ... s, before the run stops. Ten steps without a loss allow all of them again; on
    machines of their own (`engine_nodes`), an hour without one."""


class ReshardingConfig(Section):
    """The bridge from the policy's shards to the engines' shards."""

    transport: Literal[
        "auto",
        "files",
        "gloo",
        "nccl",
        "cuda_ipc",
        "vllm_nccl",
        "vllm_ipc",
        "vllm_nccl_m2n",
    ] = "auto"
    """files: shared memory. gloo, nccl: point to point. cuda_ipc: engines on the trainers' devices.
    vllm_*: vLLM's own backends. auto: files on CPU; on GPU nccl for engines with their own
    devices, cuda_ipc for others on one machine, files in run_dir on several."""
    bucket_mib: int = Field(default=512, gt=0, le=1_048_576)
    """Weights under way at a time; a transport holds at most two buckets beside the model on either
    side. An engine also holds, whole, those modules of a bucket that its kernel keeps in another
    layout; `megatron-dapo plan` prints how much."""
    timeout_seconds: WholeSeconds = 600
    """Longest wait for the other side of a transfer, and, a little longer, for an engine in any
    step of an update, such as taking all weights."""
    verify_digests: bool = True
    """Compare a 64-bit hash of every engine parameter after each update."""
    probe_tokens: int = Field(default=16, ge=0, le=65_536)
    """Tokens that each engine samples after an update, whose log-probs engine and trainer compare.
    0: off."""
    probe_tolerance: float | None = Field(default=None, gt=0.0, le=100.0)
    """Mean absolute difference of those log-probs, nats. Default: 1e-3 in float32, 0.1 in
    bfloat16."""
    in_flight: Literal["wait", "keep"] = "wait"
    """Requests that run when an update comes: finish on the old weights, or go on with the new
    ones and carry both versions."""


class SamplingConfig(Section):
    """Dynamic sampling (DAPO Eq. 11): only groups of mixed accuracy are trained on, exactly
    rollout.prompts_per_step of them. A refill draws what is missing divided by the share of groups
    that were mixed so far."""

    dynamic: bool = True
    """Off: every group trains, and one of equal accuracy has advantage 0."""
    max_rounds: PositiveInt = 10
    """Rounds of prompts_per_round groups that a step may generate before `when_short` applies. The
    released script: 10."""
    prompts_per_round: PositiveInt | None = None
    """Prompts of the first wave of a step, and of a round. Default: rollout.prompts_per_step, the
    first wave by the share of mixed groups in earlier steps."""
    max_seconds: Seconds | None = None
    """Time that a step may wait for its groups; then it takes those that are complete, and where
    they are too few `when_short` applies."""
    when_short: Literal["stop", "train"] = "stop"
    """Too few mixed groups by max_rounds or max_seconds: stop with the counts, or train on what
    there is. A step without any has no gradient, and stops the run in either case."""
    surplus: Literal["drop", "carry"] = "drop"
    """Mixed groups beyond the target. drop: the reference's rule; their prompts come again. carry:
    they train in the next step, one update later; needs loss.mismatch."""
    unfinished: Literal["abort", "finish", "continue"] = "abort"
    """Responses that still run when the step has its groups. abort (with drop): those prompts come
    again. finish (with carry): they are waited for. continue (with carry): they stop, and go on in
    the next step where they were, with its weights."""


class LoggingConfig(Section):
    """Sinks. metrics.jsonl is always written and is the truth."""

    console: bool = True
    """One line a step."""
    tensorboard: bool = False
    """Event files in run_dir/tensorboard."""
    wandb: bool = False
    """By a process of its own, which no step waits for. Key from the environment or netrc;
    WANDB_MODE=offline works."""
    wandb_project: str = "megatron_dapo"
    """Project that the run appears in."""
    samples_per_step: NaturalInt = 4
    """Responses a step written to samples.jsonl with their prompt, answer and reward."""


class RunConfig(Section):
    """One run. Frozen: what is resolved here is what is saved, printed and trained."""

    run_dir: LocalPath
    """Everything that the run writes."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of weights' dropout, prompt order and every sampled response."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where a device is visible. cuda on a machine without one: dry run only."""
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    training: TrainingConfig = TrainingConfig()
    moe: MoeConfig = MoeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    resharding: ReshardingConfig = ReshardingConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def on_one_machine(self) -> bool:
        """Trainers and engines share memory and its files."""
        return self.parallel.nodes == 1 and not self.rollout.remote_engines

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """In what the engines keep their parameters: `rollout.engine_dtype`, or the policy's."""
        chosen = self.rollout.engine_dtype
        return self.model.dtype if chosen == "auto" else chosen

    @property
    def responses_per_step(self) -> int:
        """Responses that one rollout step trains on."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one rollout step: DAPO 4.1 has 512 x 16 / 512 = 16."""
        return self.responses_per_step // self.training.responses_per_update * self.training.epochs

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt + response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens
