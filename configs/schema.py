"""What a run is made of, a frozen dataclass a section; defaults, units and docs stand here alone.

One file (`dflash.toml`) holds the sections of every stage; a stage reads the sections it needs.
Where a default says "0: ..." or "empty: ...", the value named there comes from the target or the
data, is resolved once at the start of the stage, and is written into the run's `run.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from dflash_pipeline.configs.sizes import parse_size

# targets that come with the package or one of its own: no server knows these names
PACKAGED = ("toy", "smollm2")


# what a change of a setting of training would change, marked on the field, or in `Run` on a whole
# section; `effects.py` says who may change which
LEARNT = MappingProxyType({"effect": "learnt"})
"""What a run learns."""
RESULT = MappingProxyType({"effect": "result"})
"""How a run begins, is judged, or ends early; not what one that goes on learns."""
FREE = MappingProxyType({"effect": "free"})
"""Neither."""


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """The frozen language model that the drafter learns to run ahead of."""

    id: str = ""
    """Hugging Face directory or hub name, a llama-architecture .gguf file, `toy` or `smollm2`."""
    revision: str = ""
    """Hub revision; empty: the hub's default."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute type; auto: bf16 on CUDA, fp32 on a CPU."""
    layer_ids: tuple[int, ...] = ()
    """Captured layers, each the output of that 0-based layer; empty: spread by the DFlash rule."""
    num_capture_layers: int = 5
    """How many layers the rule spreads when `layer_ids` is empty."""
    mask_token_id: int = -1
    """Embedding row that stands for a masked slot, never pad or eos; -1: the tokenizer's mask
    token, else the first embedding row beyond the tokenizer's ids."""
    thinking: Literal["default", "on", "off"] = "default"
    """`enable_thinking` for the chat template; default: not passed."""
    template_args: tuple[str, ...] = ()
    """Further `key=value` arguments of the chat template."""
    system_prompt: str = ""
    """System turn put before conversations that have none; empty: none."""
    num_gpus: int = 1
    """GPUs that one copy of the target is spread over, layer after layer, where one GPU cannot hold
    it; a process uses so many of the GPUs given."""
    trust_remote_code: bool = False
    """Run Python that comes with the model. Off unless asked for."""

    def __post_init__(self) -> None:
        _need(self.num_gpus >= 1, f"target.num_gpus must be at least 1, got {self.num_gpus}")
        _need(self.num_capture_layers >= 1, "target.num_capture_layers must be at least 1")
        _need(
            self.mask_token_id >= -1,
            f"target.mask_token_id must be at least 0, or -1 for the usual one, got "
            f"{self.mask_token_id}",
        )
        for layer_id in self.layer_ids:
            _need(layer_id >= 0, f"target.layer_ids holds {layer_id}: a layer id is at least 0")
        _need(
            len(set(self.layer_ids)) == len(self.layer_ids),
            f"target.layer_ids {self.layer_ids} names a layer twice",
        )
        for argument in self.template_args:
            _need("=" in argument, f"target.template_args holds {argument!r}: write key=value")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Conversations to learn from."""

    files: tuple[str, ...] = ()
    """JSONL (.jsonl, .jsonl.gz), Parquet, or `hf:NAME[:SPLIT]` for a Hugging Face data set."""
    max_len: int = 3072
    """Longest sample, in tokens."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a longer one: cut off there, or left out. generate and eval cut the answer
    off, or leave out a prompt without room for `max_new_tokens`; servers have their own limit."""
    limit: int = 0
    """Rows read at most; 0: all."""
    heldout: float = 0.02
    """Share of samples kept from training, chosen by the hash of their first user prompt; 1: all,
    for a store that is only evaluated on."""
    max_bad_share: float = 0.05
    """Share of rows that may be unusable before the run fails."""

    def __post_init__(self) -> None:
        _need(self.max_len >= 2, f"data.max_len must be at least 2, got {self.max_len}")
        _need(self.limit >= 0, f"data.limit must be at least 0, got {self.limit}")
        _need(0 <= self.heldout <= 1, f"data.heldout must be in [0, 1], got {self.heldout}")
        _need(0 <= self.max_bad_share <= 1, "data.max_bad_share must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """The Zarr store of hidden states."""

    path: str = ""
    """Directory of the store, or several separated by commas, on whose mounts its shards are shared
    out; the first holds all but the rows."""
    hidden_mode: Literal["bf16", "int8", "int4"] = "bf16"
    """How a captured layer's row is stored."""
    last_mode: Literal["bf16", "int8", "int4", "none"] = "bf16"
    """How the post-norm last state is stored; none: not at all (enough for plain cross-entropy)."""
    last_rows: Literal["teacher", "all"] = "teacher"
    """Rows of `last`: those that predict a supervised token, or all."""
    shard_bytes: int = 1 << 30
    """A shard is the fewest whole batches whose `hidden` reaches this size, in bytes."""

    def __post_init__(self) -> None:
        _need(
            self.shard_bytes >= 1, f"store.shard_bytes must be at least 1, got {self.shard_bytes}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """Answers written by the target itself: what a drafter must learn to predict."""

    out: str = ""
    """JSONL file of answers; run again to resume."""
    samples: int = 1
    """Answers a prompt; ids become `<id>#k`."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    """Nucleus of the sampled distribution; 1: whole."""
    top_k: int = 0
    """Most likely tokens that may be sampled; 0: all."""
    max_new_tokens: int = 1024
    """Longest answer, in tokens."""
    batch_size: int = 32
    """Prompts generated together on one device."""
    endpoints: tuple[str, ...] = ()
    """OpenAI-compatible servers (http://host:port/v1) to ask instead of running the target here."""
    concurrency: int = 32
    """Requests in flight per endpoint."""
    retries: int = 5
    """Attempts after a failed request."""
    timeout_s: float = 600.0
    """Longest wait for one answer, in seconds."""
    seed: int = 0
    """Seed of sampled answers; each answer derives its own from it, its id and k."""

    def __post_init__(self) -> None:
        _need(self.samples >= 1, f"generate.samples must be at least 1, got {self.samples}")
        _need(self.temperature >= 0, "generate.temperature must be at least 0")
        _need(0 < self.top_p <= 1, f"generate.top_p must be in (0, 1], got {self.top_p}")
        _need(self.top_k >= 0, f"generate.top_k must be at least 0, got {self.top_k}")
        _need(self.retries >= 0, f"generate.retries must be at least 0, got {self.retries}")
        _need(self.timeout_s > 0, f"generate.timeout_s must be above 0, got {self.timeout_s}")
        _need(self.max_new_tokens >= 1, "generate.max_new_tokens must be at least 1")
        _need(self.batch_size >= 1, "generate.batch_size must be at least 1")
        _need(self.concurrency >= 1, "generate.concurrency must be at least 1")
        _need(
            self.samples == 1 or self.temperature > 0,
            f"generate.samples = {self.samples} needs a temperature above 0: "
            "greedy answers are all the same",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """One pass of the target over the data."""

    token_budget: int = 49152
    """Tokens of a padded batch, at most."""
    num_buckets: int = 6
    """Length buckets, chosen from the data."""
    pad_multiple: int = 64
    """A batch's padded length is that of its longest sample, rounded up to this many tokens."""
    gate_samples: int = 4
    """Samples per bucket group that the gate recomputes one by one before the first commit."""
    max_bad_share: float = 0.01
    """Share of samples with NaN, Inf or all-zero rows before the run fails."""
    max_shard_failures: int = 3
    """A shard that failed this often is set aside and named at the end."""
    heartbeat_s: float = 10.0
    """Seconds between a worker's signs of life."""
    hung_s: float = 600.0
    """A lease whose holder gave no sign of life for so many seconds is taken over."""
    device_buffers: int = 2
    """Batches whose rows the GPU holds at the same time: one being computed, one being copied."""
    host_buffers: int = 4
    """Batches held in host memory on their way to the disk."""
    compile: bool = False
    """Compile the target's decoder layers before the first shard: one version for all lengths. The
    gate judges their rows by the plain layers. A family that cannot be compiled is refused."""
    quota: str = ""
    """Most bytes of the store on disk, as in 4TB or 1.5TiB: capture waits there until every
    training run that follows the store has used a shard, which is deleted then. Empty: no bound."""
    num_consumers: int = 1
    """With a quota: no shard is deleted before so many training runs follow the store."""
    price: float = 0.0
    """What a GPU costs an hour, in any currency; 0: no cost is told."""
    force: bool = False
    """Capture although int8 or int4 misses its error bounds for this target; the store says so."""
    calibration_from: str = ""
    """Store of int8 or int4 rows whose calibration the new one takes over, so that both can be
    trained on together or merged; empty: the new one is calibrated on its own data."""
    seed: int = 0
    """Seed of the order of batches."""

    def __post_init__(self) -> None:
        parse_size(self.quota)
        _need(
            self.num_consumers >= 1,
            f"capture.num_consumers must be at least 1, got {self.num_consumers}",
        )
        _need(
            self.num_consumers == 1 or self.quota != "",
            f"capture.num_consumers is {self.num_consumers}, but without capture.quota no shard is "
            "deleted: give --quota as well, or leave it out",
        )
        _need(self.price >= 0, f"capture.price must be at least 0, got {self.price}")
        _need(self.device_buffers >= 2, "capture.device_buffers must be at least 2")
        _need(self.host_buffers >= 2, "capture.host_buffers must be at least 2")
        _need(self.token_budget >= 64, "capture.token_budget must be at least 64")
        _need(self.num_buckets >= 1, "capture.num_buckets must be at least 1")
        _need(self.pad_multiple >= 1, "capture.pad_multiple must be at least 1")
        _need(self.gate_samples >= 1, "capture.gate_samples must be at least 1")
        _need(0 <= self.max_bad_share <= 1, "capture.max_bad_share must be in [0, 1]")
        _need(self.max_shard_failures >= 1, "capture.max_shard_failures must be at least 1")
        _need(self.heartbeat_s > 0, "capture.heartbeat_s must be above 0")
        _need(self.hung_s > 2 * self.heartbeat_s, "capture.hung_s must exceed two heartbeats")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """The network that is trained: a few Qwen3 layers over the target's features."""

    num_layers: int = 5
    """Decoder layers."""
    block_size: int = 16
    """Slots of a block, the anchor's included; it proposes one token fewer."""
    layer_ids: tuple[int, ...] = ()
    """Captured layers it reads, a subset of the store's; empty: all of them."""
    intermediate_size: int = 0
    """Width of the MLP; 0: the target's (its dense width; 3 x hidden for a pure MoE)."""
    num_heads: int = 0
    """Query heads; 0: the target's."""
    num_kv_heads: int = 0
    """Key and value heads; 0: the target's."""
    head_dim: int = 0
    """Width of a head; 0: the target's."""
    rope_theta: float = 0.0
    """Base of the rotary embedding; 0: the target's."""
    sliding_window: int = 0
    """Context tokens that a sliding layer's query sees, itself included; 0: full attention."""
    num_full_layers: int = 0
    """With a sliding window: the last layers that keep full attention."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        _need(self.num_layers >= 1, f"drafter.num_layers must be at least 1, got {self.num_layers}")
        _need(self.block_size >= 2, f"drafter.block_size must be at least 2, got {self.block_size}")
        for layer_id in self.layer_ids:
            _need(layer_id >= 0, f"drafter.layer_ids holds {layer_id}: a layer id is at least 0")
        _need(
            len(set(self.layer_ids)) == len(self.layer_ids),
            f"drafter.layer_ids {self.layer_ids} names a layer twice",
        )
        sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
        for name in (*sizes, "rope_theta"):
            _need(getattr(self, name) >= 0, f"drafter.{name} must be at least 0")
        _need(self.init_std > 0, f"drafter.init_std must be above 0, got {self.init_std}")
        _need(
            0 <= self.num_full_layers <= self.num_layers,
            "drafter.num_full_layers must be between 0 and drafter.num_layers",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What the drafter is asked to get right."""

    ce: float = 1.0
    """Weight of cross-entropy against the data's token."""
    kl: float = 0.0
    """Weight of forward KL against the target's distribution; needs `last` in the store."""
    temperature: float = 1.0
    """Temperature of both distributions in the KL term."""
    tv: float = 0.0
    """Weight of the total variation between both distributions at temperature 1: the chance that
    sampling refuses a slot. Needs `last` in the store."""
    cap_lambda: float = 0.0
    """Weight of the drafter's entropy where its likeliest token is right (CAP): sharper there,
    which greedy acceptance does not need and sampled acceptance can lose by."""
    slot_weights: Literal["gamma", "dpace"] = "gamma"
    """What a slot weighs: gamma falls with its place in the block, dpace is the drafter's own
    chance of getting so far (arXiv 2605.18810)."""
    gamma: float = 7.0
    """slot_weights = gamma: each slot weighs exp(-1/gamma) of the one before (7, 5, 4 for blocks of
    16, 10, 8)."""
    dpace_alpha: float = 0.5
    """slot_weights = dpace: share of certainty mixed into each chance, so that no slot weighs 0."""
    position_chunk: int = 1280
    """Drafted positions whose logits exist at the same time (4 bytes x vocabulary each)."""

    def __post_init__(self) -> None:
        _need(self.ce >= 0, f"loss.ce must be at least 0, got {self.ce}")
        _need(self.kl >= 0, f"loss.kl must be at least 0, got {self.kl}")
        _need(self.tv >= 0, f"loss.tv must be at least 0, got {self.tv}")
        _need(self.cap_lambda >= 0, f"loss.cap_lambda must be at least 0, got {self.cap_lambda}")
        _need(
            self.ce + self.kl + self.tv > 0,
            "loss.ce, loss.kl and loss.tv are all 0: nothing to learn",
        )
        _need(
            0 <= self.dpace_alpha < 1,
            f"loss.dpace_alpha must be in [0, 1), got {self.dpace_alpha}",
        )
        _need(self.temperature > 0, "loss.temperature must be above 0")
        _need(self.gamma > 0, f"loss.gamma must be above 0, got {self.gamma}")
        _need(self.position_chunk >= 1, "loss.position_chunk must be at least 1")

    @property
    def needs_last(self) -> bool:
        """Whether a term compares with the target's distribution: the store must hold `last`."""
        return self.kl > 0 or self.tv > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW over fp32 masters and its schedule."""

    lr: float = 6e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms have none."""
    clip: float = 1.0
    """Largest global gradient norm; 0: not clipped."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Learning rate after warm-up; wsd holds it, then decays."""
    warmup: float = 0.04
    """Share of all steps over which the learning rate rises from 0."""
    decay: float = 0.2
    """wsd: share of all steps over which it falls at the end."""
    min_lr_share: float = 0.0
    """Share of the peak that is left at the last step."""

    def __post_init__(self) -> None:
        _need(self.lr > 0, f"optim.lr must be above 0, got {self.lr}")
        _need(self.eps > 0, f"optim.eps must be above 0, got {self.eps}")
        _need(self.weight_decay >= 0, "optim.weight_decay must be at least 0")
        _need(0 <= self.beta1 < 1, "optim.beta1 must be in [0, 1)")
        _need(0 <= self.beta2 < 1, "optim.beta2 must be in [0, 1)")
        _need(self.clip >= 0, "optim.clip must be at least 0")
        _need(0 <= self.warmup < 1, "optim.warmup must be in [0, 1)")
        _need(0 < self.decay <= 1, "optim.decay must be in (0, 1]")
        _need(
            self.schedule != "wsd" or self.warmup + self.decay <= 1,
            "optim.warmup + optim.decay must not exceed 1 with optim.schedule = wsd",
        )
        _need(0 <= self.min_lr_share <= 1, "optim.min_lr_share must be in [0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """From disk to the GPU."""

    threads: int = 2
    """Reader threads a trainer."""
    depth: int = 3
    """Batches held ready in pinned memory."""
    io: Literal["auto", "mmap", "read", "direct"] = "auto"
    """How rows come from the disk: mmap copies them out of a memory map, read is preadv, direct is
    O_DIRECT past the page cache; auto measures for up to a second at the start and says what it
    took. All give the same bytes."""
    check: bool = False
    """Compare the checksum of every chunk that is read."""

    def __post_init__(self) -> None:
        _need(self.threads >= 1, f"feed.threads must be at least 1, got {self.threads}")
        _need(self.depth >= 1, f"feed.depth must be at least 1, got {self.depth}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The training run."""

    out: str = field(default="", metadata=FREE)
    """Run directory; empty: `runs/<store name>-<time>`."""
    stores: tuple[str, ...] = field(default=(), metadata=RESULT)
    """Stores to train on, each `PATH` or `PATH:SHARE`; empty: `store.path`."""
    drop_domains: tuple[str, ...] = field(default=(), metadata=LEARNT)
    """Domains whose samples are neither trained on nor validated with."""
    drop_samples: tuple[str, ...] = field(default=(), metadata=LEARNT)
    """Keys of such samples, or `@FILE` with one a line."""
    init_from: str = field(default="", metadata=RESULT)
    """Drafter checkpoint to start from; empty: random weights."""
    epochs: int = field(default=6, metadata=LEARNT)
    """Passes over the samples."""
    max_steps: int = field(default=0, metadata=LEARNT)
    """Optimizer steps at most; 0: as the epochs give."""
    anchors_per_sample: int = field(default=512, metadata=LEARNT)
    """Blocks drawn from one sample, at most."""
    batch_anchors: int = field(default=512, metadata=LEARNT)
    """Blocks of one batch, at most."""
    batch_tokens: int = field(default=8192, metadata=LEARNT)
    """Context tokens of one batch, at most."""
    accumulate: int = field(default=1, metadata=LEARNT)
    """Batches a rank adds up before an optimizer step."""
    dtype: Literal["auto", "bf16", "fp32"] = field(default="auto", metadata=LEARNT)
    """Compute type; masters are fp32. auto: bf16 on CUDA, fp32 on a CPU."""
    compile: bool = field(default=True, metadata=LEARNT)
    """On CUDA: pad batches to one shape of drafted rows and compile the drafter for it. off:
    batches as they are, nothing compiled. On a CPU always off."""
    seed: int = field(default=0, metadata=LEARNT)
    """Seed of weights, order, anchors and noise."""
    noise_std: float = field(default=0.0, metadata=LEARNT)
    """Standard deviation of noise on the features that `fc` reads, in units of `noise_scale`; 0:
    none. Never at validation."""
    noise: Literal["gaussian", "uniform"] = field(default="gaussian", metadata=LEARNT)
    """Its distribution."""
    noise_scale: Literal["rms", "absolute"] = field(default="rms", metadata=LEARNT)
    """rms: relative to the root mean square of each row of each layer."""
    follow: bool = field(default=True, metadata=FREE)
    """Train on a store that is still being captured; off: refuse a store that is
    still being captured."""
    log_every: int = field(default=10, metadata=FREE)
    """Steps between log lines."""
    save_every: int = field(default=500, metadata=FREE)
    """Steps between checkpoints."""
    keep: int = field(default=3, metadata=FREE)
    """Checkpoints kept besides the best."""
    validate_every: int = field(default=500, metadata=RESULT)
    """Steps between replays of held-out samples; 0: only at the end."""
    validate_samples: int = field(default=64, metadata=RESULT)
    """Held-out samples replayed, at most."""
    patience: int = field(default=0, metadata=RESULT)
    """Validations in a row without a gain after which the run ends early; 0: it never does."""
    min_gain: float = field(default=0.01, metadata=RESULT)
    """How much tau must rise to count as a gain; any rise makes a checkpoint the best."""
    max_bad_steps: int = field(default=20, metadata=FREE)
    """Steps in a row without a finite loss and gradient before the run fails."""
    timeout_s: float = field(default=600.0, metadata=FREE)
    """Longest wait for another rank, in seconds; one that hangs for nine tenths of it says where,
    with every thread's stack in its log, and ends."""
    profile: str = field(default="", metadata=FREE)
    """Steps to trace with torch.profiler into OUT/profile, as FIRST-LAST; empty: none."""

    def __post_init__(self) -> None:
        for name in ("epochs", "anchors_per_sample", "batch_anchors", "accumulate", "log_every"):
            _need(getattr(self, name) >= 1, f"train.{name} must be at least 1")
        for name in ("save_every", "keep", "max_bad_steps"):
            _need(getattr(self, name) >= 1, f"train.{name} must be at least 1")
        _need(self.batch_tokens >= 2, "train.batch_tokens must be at least 2")
        _need(self.max_steps >= 0, "train.max_steps must be at least 0")
        _need(self.validate_every >= 0, "train.validate_every must be at least 0")
        _need(self.validate_samples >= 1, "train.validate_samples must be at least 1")
        _need(self.patience >= 0, f"train.patience must be at least 0, got {self.patience}")
        _need(self.min_gain >= 0, f"train.min_gain must be at least 0, got {self.min_gain}")
        _need(
            not self.patience or self.validate_every > 0,
            "train.patience counts validations: set train.validate_every above 0",
        )
        _need(self.timeout_s > 0, f"train.timeout_s must be above 0, got {self.timeout_s}")
        _need(self.noise_std >= 0, f"train.noise_std must be at least 0, got {self.noise_std}")
        first, dash, last = self.profile.partition("-")
        _need(
            not self.profile
            or (dash == "-" and first.isdecimal() and last.isdecimal() and int(first) <= int(last)),
            f"train.profile must be FIRST-LAST, as 20-25, or empty, got {self.profile!r}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Acceptance, measured by decoding."""

    drafter: str = ""
    """A run directory (best, else last), a step, or a z-lab or speculators checkpoint."""
    prompts: tuple[str, ...] = ()
    """Files of conversations whose last user turn is answered; empty: the store's held-out split
    by replay."""
    endpoint: str = ""
    """A vLLM or SGLang server (http://host:port/v1) that runs target and drafter: its own counters
    tell the acceptance, nothing is loaded here. Empty: none."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    limit: int = 0
    """Prompts, or samples of a store, of each domain, at most; 0: all."""
    as_stored: bool = False
    """Round live features through the store's mode before the drafter sees them."""
    batch_size: int = 1
    """Prompts of one domain that are decoded together."""
    temperature: float = 0.0
    """0: greedy. Above: drafts are drawn from the drafter's distribution and kept by rejection
    sampling, so that answers are samples of the target's own."""
    top_p: float = 1.0
    """Nucleus of the sampled distribution; 1: whole."""
    top_k: int = 0
    """Most likely tokens that may be sampled; 0: all."""
    seed: int = 0
    """Seed of sampled answers, of the untrained drafter and of the resamples of intervals."""
    lookup_ngram: int = 3
    """Longest suffix that the prompt-lookup baseline matches, in tokens."""
    json: str = ""
    """File for the results; empty: none."""
    plot: str = ""
    """PNG file for tau by domain and acceptance by slot; empty: none."""

    def __post_init__(self) -> None:
        _need(self.max_new_tokens >= 1, "eval.max_new_tokens must be at least 1")
        _need(self.limit >= 0, "eval.limit must be at least 0")
        _need(self.lookup_ngram >= 1, "eval.lookup_ngram must be at least 1")
        _need(self.batch_size >= 1, f"eval.batch_size must be at least 1, got {self.batch_size}")
        _need(self.temperature >= 0, "eval.temperature must be at least 0")
        _need(0 < self.top_p <= 1, f"eval.top_p must be in (0, 1], got {self.top_p}")
        _need(self.top_k >= 0, f"eval.top_k must be at least 0, got {self.top_k}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All sections; what `dflash config` prints and `run.json` records."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig, metadata=LEARNT)
    loss: LossConfig = field(default_factory=LossConfig, metadata=LEARNT)
    optim: OptimConfig = field(default_factory=OptimConfig, metadata=LEARNT)
    feed: FeedConfig = field(default_factory=FeedConfig, metadata=FREE)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
