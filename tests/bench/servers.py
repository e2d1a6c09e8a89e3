"""Exported drafters in the code of the servers that run them: what they make of config and weights.

    python tests/bench/servers.py vllm [--only qwen3] [--out tests/bench/servers_vllm.json]
    python tests/bench/servers.py sglang [--out tests/bench/servers_sglang.json]

Needs no GPU: each server in an environment of its own (vllm or sglang, and what this package
needs). One that is not installed is said not to have been run. For a drafter of each family of
targets, each kind of layers and each layout, the server's own code parses the printed command,
converts config.json, builds its model and loads the weights; then keys, values, hidden states and
logits of a block are held against ours, in fp32. Attention itself, whose kernels need a GPU, is
written out here with the causality and the window that the server's layers state; so is what a
server's compiled library holds. Each case has a control, a fault made on purpose that must be seen.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.append(str(Path(__file__).parent))
from server_cases import TOLERANCE, Case, cases, written

NOT_RUN = (
    "a whole server, its compiled kernels and bf16: they need a GPU",
    "the layers that targets hand out, but for the families in captured_layers",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=("vllm", "sglang"))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    chosen = parser.parse_args()
    if importlib.util.find_spec(chosen.server) is None:
        print(f"not run: {chosen.server} is not installed in this environment")
        return 0
    # each reads the environment as it is imported
    if chosen.server == "vllm":
        from servers_vllm import Server
    else:
        from servers_sglang import Server
    figures, layouts = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder)
        for case in cases(folder, chosen.server, chosen.only):
            figures.append(_figure(server, case))
            layouts.setdefault(case.layout, written(case))
        about = server.about(folder)
    names = (chosen.server, "torch", "transformers")
    result = {
        "versions": {each: importlib.metadata.version(each) for each in names},
        "python": platform.python_version(),
        "tolerance": TOLERANCE,
        "not_run": NOT_RUN,
        **about,
        "cases": figures,
        "layouts": layouts,
    }
    num_failed = sum("error" in figure for figure in figures)
    print(f"{len(figures) - num_failed} of {len(figures)} cases agree; {json.dumps(about)}")
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    is_captured = all(error <= TOLERANCE for error in about["captured_layers"].values())
    return 0 if figures and not num_failed and is_captured else 1


def _figure(server: Any, case: Case) -> dict[str, Any]:
    try:
        figure = {"name": case.name, **server.check(case)}
        worst = max(figure["errors"].values())
        if not worst <= TOLERANCE:
            raise ValueError(f"differs from ours: {figure['errors']}")
        if not figure["control"] > 100 * TOLERANCE:
            raise ValueError(f"features in another order went unseen: {figure['control']}")
        print(f"{case.name}: error {worst:.1e}, control {figure['control']:.2f}", flush=True)
    except Exception as error:
        traceback.print_exc()
        figure = {"name": case.name, "error": f"{type(error).__name__}: {error}"}
        print(f"{case.name}: {figure['error']}", flush=True)
    return figure


if __name__ == "__main__":
    sys.exit(main())
