#!/usr/bin/env bash
# mypy sees the tree under its import name: `mypy .` would call the modules by their folders.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
ln -s "$root" "$folder/dflash_pipeline"
cd "$folder"
MYPYPATH="$folder" python -m mypy --config-file "$root/pyproject.toml" \
  --cache-dir "$root/.mypy_cache" -p dflash_pipeline "$@"
