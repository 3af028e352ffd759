#!/usr/bin/env bash
# Real harnesses through the gateway, against the scripted engine: `make e2e-harness`.
# Makes what it needs (setup.sh), then runs in a network that has only loopback. Arguments: subjects to run.
set -euo pipefail
# shellcheck source=tests/e2e/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

need git git
need ip iproute2
need unshare util-linux
need npm npm

own_environment
npm_package harness/claude-code @anthropic-ai/claude-code@2.1.197
npm_package harness/codex @openai/codex@0.171.0
npm_package harness/opencode opencode-ai@1.18.33
npm_package harness/pi @mariozechner/pi-coding-agent@0.73.1
environment harness/py "$here/harness/requirements.txt"

path="$E2E_CACHE/harness/py/bin"
for name in claude-code codex opencode pi; do path="$path:$E2E_CACHE/harness/$name/node_modules/.bin"; done
if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 6) ? 0 : 1)'; then
  npm_package harness/node "node-linux-$(uname -m | sed "s|x86_64|x64|; s|aarch64|arm64|")@22.23.5" # pi needs 20.6
  path="$E2E_CACHE/harness/node/node_modules/.bin:$path"
fi

cd "$repository"
PYTHONPATH="$repository/src:$repository" E2E_PATH="$path:$(dirname "$(command -v node)"):/usr/local/bin:/usr/bin:/bin" \
  exec "$gristmill" -m tests.e2e.harness "$@"
