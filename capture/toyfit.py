"""Train the toy target from nothing: `python -m dflash_pipeline.capture.toyfit OUT`.

Writes a Hugging Face directory: a Qwen3 of half a million parameters, its tokenizer and its chat
template. The weights are trained in fp32 and judged as they are saved, rounded to bf16.

Shape letters: B sequences of a batch, T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_pipeline.capture import toytext
from dflash_pipeline.configs.disk import write_whole
from dflash_pipeline.configs.jsonfile import read_object

SEED = 0
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD, START, END, MASK = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
NUM_STEPS = 900
BATCH_SEQUENCES = 16
BATCHES_SORTED = 8
NUM_DRILL_STEPS = 100
DRILL_EVERY = 3
DRILL_SEQUENCES = 32
COPY_SHARE = 0.35
PEAK_LR = 4e-3
MATRIX_LR = 0.02
MOMENTUM = 0.95
WARMUP_SHARE = 0.05
DECAY_SHARE = 0.6
NUM_TOKENIZER_TEXTS = 3000
NUM_JUDGED = 40


def render(messages: toytext.Messages) -> list[tuple[str, bool]]:
    """The conversation as the chat template writes it, cut into (text, is it learned) pieces."""
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        pieces.append((f"{START}{message['role']}\n", False))
        pieces.append((f"{message['content']}{END}", message["role"] == "assistant"))
        pieces.append(("\n", False))
    return pieces


def mixed(seed: int) -> itertools.chain[toytext.Messages]:
    """Endless training conversations, the domains in turn; sums are the hardest and come twice."""
    streams = [toytext.conversations(domain, "train", seed) for domain in toytext.DOMAINS]
    streams.append(toytext.conversations("math", "train", seed + 1))
    return itertools.chain.from_iterable(zip(*streams, strict=True))


def drills(seed: int) -> Iterator[toytext.Messages]:
    """Endless short exercises in copying numbers and in sums.

    Conversations alone hold too few digits: after 500 steps of them the model still guessed the
    numbers it should have copied out of the prompt.
    """
    draw = random.Random(seed)
    while True:
        if draw.random() < COPY_SHARE:
            numbers = [draw.randint(1, 99) for _ in range(draw.randint(2, 4))]
            asked = " ".join(f"{draw.choice(toytext.GOODS)} {number}" for number in numbers)
            answer = " ".join(map(str, numbers))
        else:
            sums = [_sum(draw) for _ in range(draw.randint(2, 3))]
            asked = "; ".join(f"{left} {sign} {right}" for left, sign, right, _ in sums)
            answer = "\n".join(
                f"{left} {sign} {right} = {result}" for left, sign, right, result in sums
            )
        yield [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _sum(draw: random.Random) -> tuple[int, str, int, int]:
    """(left, sign, right, result) out of the ranges that the conversations use."""
    small, other = draw.randint(2, 9), draw.randint(2, 9)
    large = draw.randint(1, 50)
    return draw.choice(
        (
            (large, "+", small, large + small),
            (large + small, "-", small, large),
            (small, "*", other, small * other),
            (small * other, "/", small, other),
        )
    )


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens; digits stay single, so that sums can be learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        "".join(text for text, _ in render(messages))
        for messages in itertools.islice(mixed(SEED), NUM_TOKENIZER_TEXTS)
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[START],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def toy_config() -> Qwen3Config:
    """Five layers, 96 wide; the embedding is the head."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL_TOKENS.index(END),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=None,
    )


def batch(
    conversations: Sequence[toytext.Messages], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_BT, padded on the right, and learned_BT: which of them are an assistant's."""
    sequences: list[tuple[list[int], list[bool]]] = []
    for messages in conversations:
        ids: list[int] = []
        learned: list[bool] = []
        for text, is_learned in render(messages):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            learned += [is_learned] * len(piece)
        sequences.append((ids, learned))
    longest = max(len(ids) for ids, _ in sequences)
    ids_BT = torch.zeros(len(sequences), longest, dtype=torch.long)
    learned_BT = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, (ids, learned) in enumerate(sequences):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        learned_BT[row, : len(ids)] = torch.tensor(learned)
    return ids_BT, learned_BT


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Drills first; then conversations of about one length, a drill now and again."""
    exercises, texts = drills(SEED), sorted_conversations()
    for step in itertools.count():
        if step < NUM_DRILL_STEPS or step % DRILL_EVERY == 0:
            yield batch(list(itertools.islice(exercises, DRILL_SEQUENCES)), tokenizer)
        else:
            yield batch(next(texts), tokenizer)


def sorted_conversations() -> Iterator[list[toytext.Messages]]:
    """Batches of conversations of about one length: padding is computed for nothing."""
    source = mixed(SEED + 1)
    draw = random.Random(SEED)
    while True:
        pool = list(itertools.islice(source, BATCH_SEQUENCES * BATCHES_SORTED))
        pool.sort(key=lambda messages: sum(len(message["content"]) for message in messages))
        starts = list(range(0, len(pool), BATCH_SEQUENCES))
        draw.shuffle(starts)
        for start in starts:
            yield pool[start : start + BATCH_SEQUENCES]


class Muon:
    """Momentum made orthogonal by Newton-Schulz steps, for the matrices of the layers.

    150 steps to the loss that AdamW has here after 250. torch.optim.Muon iterates in bf16, which is
    slow on a CPU without bf16 instructions.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        self._matrices = matrices
        self._momenta = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.add_(update, alpha=-lr * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix whose singular values are all about 1 (quintic Newton-Schulz, 5 steps)."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide: torch.Tensor = matrix.transpose(0, 1) if is_tall else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.transpose(0, 1)
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.transpose(0, 1) if is_tall else wide


def schedule(step: int) -> float:
    """Share of the peak learning rate: up, held, down to 2 %."""
    rise = (step + 1) / (WARMUP_SHARE * NUM_STEPS)
    fall = (NUM_STEPS - step) / (DECAY_SHARE * NUM_STEPS)
    return max(0.02, min(1.0, rise, fall))


def fit(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Next-token cross-entropy on the assistant's tokens."""
    embedding = model.model.embed_tokens.weight
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    muon = Muon(matrices)
    adamw = torch.optim.AdamW([embedding, *vectors], betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    start_s = time.perf_counter()
    total, count = 0.0, 0
    for step, (ids_BT, learned_BT) in enumerate(
        itertools.islice(batches(tokenizer), NUM_STEPS), start=1
    ):
        hidden_BTH = model.model(ids_BT).last_hidden_state
        predicts_BT = learned_BT[:, 1:]
        logits_NV = hidden_BTH[:, :-1][predicts_BT] @ embedding.T
        loss = torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][predicts_BT])
        model.zero_grad()
        torch.autograd.backward([loss])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = schedule(step - 1)
        muon.step(share * MATRIX_LR)
        adamw.param_groups[0]["lr"] = share * PEAK_LR
        adamw.step()
        total, count = total + float(loss.detach()), count + 1
        if step % 50 == 0:
            seconds = time.perf_counter() - start_s
            print(f"step {step} loss {total / count:.4f} after {seconds:.0f} s", flush=True)
            total, count = 0.0, 0


@torch.no_grad()
def judge(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Share of held-out prompts answered word for word as the templates would, by domain."""
    model.train(False)
    shares: dict[str, float] = {}
    for domain in toytext.DOMAINS:
        source = toytext.conversations(domain, "eval", SEED)
        right = 0
        for messages in itertools.islice(source, NUM_JUDGED):
            ids = tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True, return_dict=False
            )
            ids_BT = torch.tensor([ids])
            answer_BT = model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=160,
                do_sample=False,
            )
            text = tokenizer.decode(answer_BT[0, len(ids) :].tolist())
            right += text == messages[-1]["content"] + END
        shares[domain] = right / NUM_JUDGED
    return shares


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Hugging Face directory, bf16 weights; the chat template stands in the tokenizer's file."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = read_object(out / "tokenizer_config.json")
    settings["chat_template"] = CHAT_TEMPLATE
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    write_whole(out / "tokenizer_config.json", text.encode())
    (out / "chat_template.jinja").unlink(missing_ok=True)


def main(out: Path) -> None:
    """Train, round, judge and save."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    tokenizer = train_tokenizer()
    model = Qwen3ForCausalLM(toy_config())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters} parameters, {NUM_STEPS} steps", flush=True)
    fit(model, tokenizer)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    save(model, tokenizer, out)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    print(f"answered as the templates would: {judge(model, tokenizer)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m dflash_pipeline.capture.toyfit OUT")
    main(Path(sys.argv[1]))
