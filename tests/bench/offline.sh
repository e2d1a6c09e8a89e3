#!/usr/bin/env bash
# For a GPU machine without a network that has torch, triton and transformers: the project and what
# else it needs, as wheels of some 20 MB.
# usage: offline.sh pack FOLDER [PYTHON]     where there is a network; PYTHON of the GPU machine: 3.12
#        offline.sh install FOLDER           on the GPU machine, in the tree; then `dflash` runs there,
#                                            and `python -m pytest -m gpu` after the line it prints
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${2:?a folder for the wheels}"
needed=(zarr numcodecs google-crc32c donfig msgspec click rich markdown-it-py mdurl tensorboard
  tensorboard-data-server absl-py grpcio markdown protobuf werkzeug accelerate pytest pluggy iniconfig)
case "$1" in
pack)
  mkdir -p "$folder"
  python -m pip download -q --no-deps --only-binary=:all: --python-version "${3:-3.12}" \
    --dest "$folder" "${needed[@]}"
  python -m pip wheel -q --no-deps --wheel-dir "$folder" "$root"
  du -sh "$folder"
  ;;
install)
  python3 -m pip install -q --no-index --no-deps "$folder"/*.whl
  # the tests import the tree, not the wheel
  tree="$(mktemp -d)"
  ln -s "$root" "$tree/dflash_pipeline"
  echo "export PYTHONPATH=$tree PYTORCH_ALLOC_CONF=expandable_segments:True"
  ;;
*)
  echo "usage: offline.sh pack|install FOLDER" >&2
  exit 2
  ;;
esac
