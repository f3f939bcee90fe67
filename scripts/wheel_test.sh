#!/usr/bin/env bash
# Builds the wheel, installs it into a clean environment, and runs a job there with the network off and outside the source tree.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m build --wheel --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
python3 -m venv "$work/venv"
wheel=$(ls "$work"/dist/*.whl)
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$wheel[train,data,services]"
cp "$root/examples/small-cpu.toml" "$work/job.toml"
mkdir -p "$work/text"
cp "$root"/docs/decisions/*.md "$work/text/"
# A network namespace of its own has loopback only: whatever asks for a host outside fails.
off=()
if unshare --net --map-root-user true 2>/dev/null; then off=(unshare --net --map-root-user); elif [ "${CI:-}" = true ]; then echo "no network namespaces here" >&2; exit 1; fi
cd "$work"
"${off[@]}" bash -euc '
  ip link set lo up 2>/dev/null || '"$work"'/venv/bin/python -c "
import fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(s, 0x8914, struct.pack(\"16sh\", b\"lo\", 0x1 | 0x40))"
  export OMP_NUM_THREADS=1 PATH='"$work"'/venv/bin:$PATH
  phalanx data prepare text --out file://./runs/corpus --vocab-size 512 2>said || { cat said; exit 1; }
  if grep Warning said; then exit 1; fi
  phalanx run job.toml --set training.steps=10
  phalanx data verify job.toml --set training.steps=10
  phalanx checkpoint export job.toml latest --out exported
  test -s exported/model.safetensors
  phalanx up -d --port-base 0 --slots 2
  phalanx job submit job.toml --set "job.name=\"served\"" --set training.steps=10 --set cluster.nproc=1 --set parallel.dp_shard=1
  phalanx job wait served --timeout 120
  phalanx down
'
echo "wheel: 1 passed, 0 failed"
