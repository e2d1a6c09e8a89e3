#!/usr/bin/env bash
# The real 135M target on a machine with two GPUs: answers on both, then capture on one GPU while
# training follows on the other, then decoding and replay. Prints what the commands print.
# usage: real_target.sh PROMPTS_DIRECTORY RESULTS_DIRECTORY [GENERATE_GPUS CAPTURE_GPUS TRAIN_GPUS]
# PROMPTS_DIRECTORY holds train_{math,code,chat}.jsonl and eval_{math,code,chat}.jsonl.
set -euo pipefail
prompts="$(cd "$1" && pwd)"
results="$2"
generate_gpus="${3:-0-1}" capture_gpus="${4:-0}" train_gpus="${5:-1}"
work="$(mktemp -d)"
cd "$work"
cat >dflash.toml <<TOML
preset = "smollm2"

[data]
files = ["answers.jsonl"]
max_len = 768
heldout = 0.05

[store]
path = "hs"
shard_bytes = 134217728

[generate]
out = "answers.jsonl"
batch_size = 384
max_new_tokens = 256

[capture]
token_budget = 49152

[drafter]
num_layers = 4

[train]
epochs = ${EPOCHS:-6}
anchors_per_sample = 48
batch_anchors = 512
batch_tokens = 8192
log_every = 50
validate_samples = 128

[eval]
max_new_tokens = 128
limit = ${PROMPTS_A_DOMAIN:-6}
TOML

timed() {
  local name="$1" start=$SECONDS
  shift
  echo "\$ $*"
  "$@" 2>&1 | sed "s/^/  [$name] /"
  echo "  [$name] took $((SECONDS - start)) s"
}

timed generate dflash generate --data "$prompts"/train_math.jsonl --data "$prompts"/train_code.jsonl \
  --data "$prompts"/train_chat.jsonl --gpus "$generate_gpus" ${LIMIT:+--limit "$LIMIT"}
timed capture dflash capture --gpus "$capture_gpus" &
capture=$!
while [ ! -d hs.logs ]; do sleep 0.2; done
# on one GPU the stages take turns
[ "$capture_gpus" != "$train_gpus" ] || wait "$capture"
timed train dflash train --gpus "$train_gpus" --store hs --out run
wait "$capture"
timed verify dflash verify --deep hs
timed replay dflash eval --drafter run --store hs --gpus "$train_gpus" --json replay.json &
replay=$!
[ "$capture_gpus" != "$train_gpus" ] || wait "$replay"
# fp32: whether outputs equal plain decoding is judged there alone
timed decode dflash eval --drafter run --target smollm2 --prompts "$prompts"/eval_math.jsonl \
  --prompts "$prompts"/eval_code.jsonl --prompts "$prompts"/eval_chat.jsonl \
  --gpus "$capture_gpus" --set target.dtype=fp32 --json decode.json
wait "$replay"
timed export dflash export run --out served
mkdir -p "$results"
cp replay.json decode.json run/metrics.jsonl run/run.json served/config.json "$results"
dflash inspect hs --json >"$results/inspect.json"
