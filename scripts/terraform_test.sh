#!/usr/bin/env bash
# Format, validity and tests of everything below infra/terraform, without an account; leaves nothing in the source tree.
# PHALANX_TF_MIRROR: a folder laid out as a filesystem mirror of providers; without it terraform finds them by its usual means.
# Exit code 77: terraform or the provider cannot be had here, and the last line says which.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/infra/terraform
skip() { echo "terraform tests skipped: $1" >&2; exit 77; }
command -v terraform >/dev/null || skip "no terraform on PATH"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CHECKPOINT_DISABLE=1 TF_IN_AUTOMATION=1 TF_INPUT=0
if [ -n "${PHALANX_TF_MIRROR:-}" ]; then
  printf 'provider_installation {\n  filesystem_mirror {\n    path = "%s"\n  }\n}\n' "$PHALANX_TF_MIRROR" >"$work/terraform.rc"
  export TF_CLI_CONFIG_FILE="$work/terraform.rc"
else
  # One that is not there is no reason to complain; one download serves module and example.
  [ -f "${TF_CLI_CONFIG_FILE:-}" ] || unset TF_CLI_CONFIG_FILE
  export TF_PLUGIN_CACHE_DIR=${TF_PLUGIN_CACHE_DIR:-$work/plugins}
  mkdir -p "$TF_PLUGIN_CACHE_DIR"
fi

terraform fmt -check -diff -recursive "$root"
cp -r "$root" "$work/terraform"
for folder in modules/phalanx-aws examples/cluster; do
  cd "$work/terraform/$folder"
  echo "== $folder"
  if ! terraform init -no-color -backend=false >"$work/init.log" 2>&1; then
    # Only a registry that is out of reach is a reason to skip; whatever else is wrong here fails.
    if [ -z "${PHALANX_TF_MIRROR:-}" ] && grep -qE 'could not connect to registry|Failed to query available provider packages' "$work/init.log"; then
      skip "the provider hashicorp/aws cannot be fetched: set PHALANX_TF_MIRROR to a mirror of it"
    fi
    cat "$work/init.log" >&2
    exit 1
  fi
  terraform validate -no-color
  terraform test -no-color
done
