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

# of one sample; its place and length are 32-bit numbers in a store
MOST_TOKENS = 1 << 31


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


def _at_least(section: str, config: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _need(value >= least, f"{section}.{name} must be at least {least}, got {value}")


def _above_zero(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _need(value > 0, f"{section}.{name} must be above 0, got {value}")


def _share(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _need(0 <= value <= 1, f"{section}.{name} must be in [0, 1], got {value}")


def _below_one(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _need(0 <= value < 1, f"{section}.{name} must be in [0, 1), got {value}")


def _layer_ids(section: str, layer_ids: tuple[int, ...]) -> None:
    for layer_id in layer_ids:
        _need(layer_id >= 0, f"{section}.layer_ids holds {layer_id}: a layer id is at least 0")
    _need(
        len(set(layer_ids)) == len(layer_ids),
        f"{section}.layer_ids {layer_ids} names a layer twice",
    )


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
        _at_least("target", self, 1, "num_gpus", "num_capture_layers")
        _need(
            self.mask_token_id >= -1,
            f"target.mask_token_id must be at least 0, or -1 for the usual one, got "
            f"{self.mask_token_id}",
        )
        _layer_ids("target", self.layer_ids)
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
        _at_least("data", self, 2, "max_len")
        _need(
            self.max_len <= MOST_TOKENS,
            f"data.max_len must be at most {MOST_TOKENS}, got {self.max_len}",
        )
        _at_least("data", self, 0, "limit")
        _share("data", self, "heldout", "max_bad_share")


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
        _at_least("store", self, 1, "shard_bytes")


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
        counts = ("samples", "max_new_tokens", "batch_size", "concurrency")
        _at_least("generate", self, 1, *counts)
        _at_least("generate", self, 0, "temperature", "top_k", "retries")
        _above_zero("generate", self, "timeout_s")
        _need(0 < self.top_p <= 1, f"generate.top_p must be in (0, 1], got {self.top_p}")
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
    # 8B shape on one H200, lognormal lengths, mean 951: 1.03 of the tokens a second of 64, because
    # 1.2 % of the places are padding, not 3.4 %
    pad_multiple: int = 16
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
    """A lease whose holder gave no sign of life for so many seconds is taken over; a worker that
    has not ended so long after the store was complete is killed."""
    device_buffers: int = 2
    """Batches whose rows the GPU holds at the same time: one being computed, one being copied."""
    host_buffers: int = 4
    """Batches held in host memory on their way to the disk."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the target's decoder layers before the first shard, one version for all lengths; the
    gate judges their rows by the plain layers. auto: on CUDA, for a target on one GPU, from 20
    million planned tokens on; plain where the compiler or the gate refuses it, and that is said.
    on: refused there."""
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
        try:
            quota_bytes = parse_size(self.quota)
        except ValueError as error:
            raise ValueError(f"capture.quota: {error}") from None
        _need(
            not self.quota or quota_bytes > 0,
            f"capture.quota {self.quota} holds no shard: leave it out for no bound",
        )
        _at_least("capture", self, 1, "num_consumers")
        _need(
            self.num_consumers == 1 or self.quota != "",
            f"capture.num_consumers is {self.num_consumers}, but without capture.quota no shard is "
            "deleted: give --quota as well, or leave it out",
        )
        _at_least("capture", self, 0, "price")
        counts = ("num_buckets", "pad_multiple", "gate_samples", "max_shard_failures")
        _at_least("capture", self, 1, *counts)
        _at_least("capture", self, 2, "device_buffers", "host_buffers")
        _at_least("capture", self, 64, "token_budget")
        _share("capture", self, "max_bad_share")
        _above_zero("capture", self, "heartbeat_s")
        _need(
            self.hung_s > 2 * self.heartbeat_s,
            f"capture.hung_s must exceed two heartbeats of {self.heartbeat_s:g} s, got "
            f"{self.hung_s:g}",
        )


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
        _at_least("drafter", self, 1, "num_layers")
        _at_least("drafter", self, 2, "block_size")
        _layer_ids("drafter", self.layer_ids)
        sizes = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
        _at_least("drafter", self, 0, *sizes, "rope_theta")
        _above_zero("drafter", self, "init_std")
        _need(
            0 <= self.num_full_layers <= self.num_layers,
            f"drafter.num_full_layers must be between 0 and drafter.num_layers, "
            f"{self.num_layers}, got {self.num_full_layers}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What the drafter is asked to get right."""

    ce: float = 0.0
    """Weight of cross-entropy against the data's token."""
    kl: float = 1.0
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
    """Drafted positions whose logits exist at the same time (4 bytes x vocabulary each). One size
    for every GPU: more gained nothing on an H200, and a card that lacks 0.8 GB for these logits of
    151,936 tokens has no room for a drafter's optimizer either. Where memory runs out by little,
    half as many save about half of the loss's."""

    def __post_init__(self) -> None:
        _at_least("loss", self, 0, "ce", "kl", "tv", "cap_lambda")
        _need(
            self.ce + self.kl + self.tv > 0,
            "loss.ce, loss.kl and loss.tv are all 0: nothing to learn",
        )
        _below_one("loss", self, "dpace_alpha")
        _above_zero("loss", self, "temperature", "gamma")
        _at_least("loss", self, 1, "position_chunk")

    @property
    def needs_last(self) -> bool:
        """Whether a term compares with the target's distribution: the store must hold `last`."""
        return self.kl > 0 or self.tv > 0


CE_ALONE = "--set loss.ce=1 --set loss.kl=0 --set loss.tv=0"
"""What a store without `last` can be trained with."""


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
    """Share of the peak that the schedule ends at."""

    def __post_init__(self) -> None:
        _above_zero("optim", self, "lr", "eps")
        _at_least("optim", self, 0, "weight_decay", "clip")
        _below_one("optim", self, "beta1", "beta2", "warmup")
        _need(0 < self.decay <= 1, f"optim.decay must be in (0, 1], got {self.decay}")
        _need(
            self.schedule != "wsd" or self.warmup + self.decay <= 1,
            f"optim.warmup + optim.decay must not exceed 1 with optim.schedule = wsd, got "
            f"{self.warmup:g} + {self.decay:g}",
        )
        _share("optim", self, "min_lr_share")


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """From disk to the GPU."""

    threads: int = 3
    """Reader threads a trainer; each reads a batch. As many as `depth` hide 300 ms of disk a batch
    behind steps of 122 ms (an 8B drafter's on an H200); two would let each wait for 28 ms."""
    depth: int = 3
    """Batches held ready in pinned memory, or being read into it."""
    io: Literal["auto", "mmap", "read", "direct"] = "auto"
    """How rows come from the disk: mmap copies them out of a memory map, read is preadv, direct is
    O_DIRECT past the page cache; auto measures for up to a second at the start and says what it
    took. All give the same bytes."""
    check: bool = False
    """Compare the checksum of every chunk that is read."""

    def __post_init__(self) -> None:
        _at_least("feed", self, 1, "threads", "depth")


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
        drawn = ("epochs", "anchors_per_sample", "batch_anchors", "accumulate", "validate_samples")
        _at_least("train", self, 1, *drawn, "log_every", "save_every", "keep", "max_bad_steps")
        _at_least("train", self, 2, "batch_tokens")
        _at_least("train", self, 0, "max_steps", "validate_every", "patience", "min_gain")
        _at_least("train", self, 0, "noise_std")
        _above_zero("train", self, "timeout_s")
        _need(
            not self.patience or self.validate_every > 0,
            "train.patience counts validations: set train.validate_every above 0",
        )
        first, dash, last = self.profile.partition("-")
        _need(
            not self.profile
            or (
                dash == "-"
                and first.isdecimal()
                and last.isdecimal()
                and 1 <= int(first) <= int(last)
            ),
            "train.profile must be FIRST-LAST, steps from 1 on, as 20-25, or empty, got "
            f"{self.profile!r}",
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
        _at_least("eval", self, 1, "max_new_tokens", "lookup_ngram", "batch_size")
        _at_least("eval", self, 0, "limit", "temperature", "top_k")
        _need(0 < self.top_p <= 1, f"eval.top_p must be in (0, 1], got {self.top_p}")


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
