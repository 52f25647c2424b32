#!/bin/sh
# Tests and measures rayrec on this machine's GPU, from a checkout: `sh tools/gpu.sh` (make gpu). docs/gpu.md tells more.
#
# Makes an environment for CUDA in build/gpu-venv, runs `make test-gpu` and `rayrec benchmark gpu`, and leaves in OUT:
#   log.txt  machine.txt  doctor.txt  rows.jsonl  trace.json.gz
# Ends with status 0 only if all tests and all measurements went well. Variables:
#   OUT              folder of the results; default gpu-results
#   PYTHON           interpreter that the environment is made with; its packages are seen in it; default python3
#   RAYREC_WHEELS    folder of wheels: nothing is fetched, and exactly these are installed, without their requirements; a wheel
#                    may be in parts NAME.whl.00, NAME.whl.01, ... (split -d -b 60M NAME.whl NAME.whl.)
#   GPU_PYTHON       python of an environment that is complete; nothing is installed
#   PARTS            of the benchmark, such as train,trace; default all
#   QUICK=1          smaller sizes
#   RAYREC_GPU_TESTS_ON=cpu   tries the script itself on the CPU
set -u
cd "$(dirname "$0")/.." || exit 2
OUT=${OUT:-gpu-results}
mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
failed=0

say() { echo "gpu: $*" | tee -a "$OUT/log.txt"; }

# stage NAME COMMAND...: the output goes to the log too; a failure is remembered, and the stages after it still run.
stage() {
  name=$1; shift
  say "$name"
  { "$@" 2>&1; echo $? >"$OUT/.status"; } | tee -a "$OUT/log.txt"
  status=$(cat "$OUT/.status"); rm -f "$OUT/.status"
  [ "$status" = 0 ] || { say "$name failed with status $status"; failed=1; }
  return "$status"
}

install() {
  "${PYTHON:-python3}" -m venv --system-site-packages build/gpu-venv || return
  pip="$GPU_PYTHON -m pip install --quiet --disable-pip-version-check --no-input"
  if [ -n "${RAYREC_WHEELS:-}" ]; then
    mkdir -p build/wheels || return
    for first in "$RAYREC_WHEELS"/*.whl.00; do
      [ ! -e "$first" ] || cat "${first%.00}".[0-9][0-9] >"build/wheels/$(basename "${first%.00}")" || return
    done
    find "$RAYREC_WHEELS" build/wheels -name '*.whl' -exec $pip --no-index --no-deps {} + || return
    $pip --no-index --no-deps --no-build-isolation --editable . || return
  else
    $pip --constraint requirements.lock --editable '.[cuda,test]' || return
  fi
}

machine() {
  date -u '+%Y-%m-%d %H:%M UTC'
  nvidia-smi 2>&1 || true
  git rev-parse HEAD 2>/dev/null || true
  "$GPU_PYTHON" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null
}

benchmark() {
  "$GPU_PYTHON" -m rayrec benchmark gpu ${QUICK:+--quick} ${PARTS:+--parts "$PARTS"} --out "$OUT" >"$OUT/rows.jsonl"
}

: >"$OUT/log.txt"
if [ -z "${GPU_PYTHON:-}" ]; then
  GPU_PYTHON=$PWD/build/gpu-venv/bin/python
  mkdir -p build
  stage "an environment in build/gpu-venv" install || exit 1
fi
export GPU_PYTHON
machine >"$OUT/machine.txt"
"$GPU_PYTHON" -m rayrec doctor >"$OUT/doctor.txt" 2>&1 || say "rayrec doctor finds problems: $OUT/doctor.txt"
if [ "${RAYREC_GPU_TESTS_ON:-}" != cpu ]; then
  stage "a GPU that torch sees" "$GPU_PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU")' || exit 1
fi
stage "tests" make --no-print-directory test-gpu GPU_PYTHON="$GPU_PYTHON"
stage "measurements" benchmark
say "results are in $OUT"
exit "$failed"
