#!/usr/bin/env bash
# For a GPU machine without a network that has torch, triton and transformers: the project and what
# else it needs, as wheels of some 11 MB.
# usage: offline.sh pack FOLDER [PYTHON]     where there is a network; PYTHON of the GPU machine: 3.12
#        offline.sh install FOLDER           on the GPU machine, in the tree; then `dflash` runs there,
#                                            and `python -m pytest -m gpu` after the line it prints
#        offline.sh pack-theirs FOLDER [PYTHON]      the same of speculators, some 8 MB, which
#        offline.sh install-theirs FOLDER VENV       head_to_head.py and peers.py are given as
#                                                    --their-python VENV/bin/python
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${2:?a folder for the wheels}"
# without tensorboard's server, 14 MB that nothing here reads
needed=(zarr numcodecs google-crc32c donfig msgspec click rich markdown-it-py mdurl tensorboard
  absl-py protobuf accelerate pytest pluggy iniconfig)
# the bounds are those of datasets; all else that these need is there
theirs=(speculators==0.9.0 hs-connectors==0.9.0 'datasets<=5.1.0' 'dill<0.4.2' 'multiprocess<0.70.20')
theirs_whole=(pydantic pydantic-settings openai loguru)
download() {
  python -m pip download -q --only-binary=:all: --python-version "${version:-3.12}" \
    --dest "$folder" "$@"
}
case "$1" in
pack)
  mkdir -p "$folder"
  version="${3:-}" download --no-deps "${needed[@]}"
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
pack-theirs)
  mkdir -p "$folder"
  version="${3:-}" download --no-deps "${theirs[@]}"
  version="${3:-}" download "${theirs_whole[@]}"
  du -sh "$folder"
  ;;
install-theirs)
  venv="${3:?a folder for the environment}"
  python3 -m venv --without-pip "$venv"
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  # behind its own packages those of this python, which may itself be of an environment
  python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$site/behind.pth"
  python3 -m pip install -q --no-index --no-deps --target "$site" "$folder"/*.whl
  "$venv/bin/python" -P -c 'from speculators.train import cli; import datasets'
  ;;
*)
  echo "usage: offline.sh pack|install|pack-theirs FOLDER, or install-theirs FOLDER VENV" >&2
  exit 2
  ;;
esac
