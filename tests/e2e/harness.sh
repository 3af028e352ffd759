#!/usr/bin/env bash
# Real harnesses through the gateway, against the scripted engine: `make e2e-harness`.
# Makes what it needs (setup.sh), then runs in a network that has only loopback. Arguments: subjects to run.
set -euo pipefail
# shellcheck source=tests/e2e/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

own_environment
harness_environments

cd "$repository"
PYTHONPATH="$repository/src:$repository" E2E_PATH="$harness_path" \
  exec "$gristmill" -m tests.e2e.harness "$@"
