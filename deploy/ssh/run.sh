#!/bin/bash
# Runs a rayrec command on machines that ssh reaches, on a Ray cluster made for it: run.sh HEAD,MACHINE,... COMMAND ...
#   deploy/ssh/run.sh me@10.0.0.1,me@10.0.0.2 train criteo_kaggle --train-data.path /data/criteo --storage-path /data/runs --name kaggle-2026-05-04
# Starts Ray on all, runs the command on the first, prints its output, ends what it started, and returns the command's status. At
# SIGTERM or Ctrl-C the run saves first. Log and runs are at the same path on all machines, or in a store. Environment:
#   RAYREC_BIN    folder of `ray` and `rayrec` on every machine [~/env/bin]
#   RAYREC_HEAD   address of the first machine that the others reach [the first of `hostname -I`]
#   RAYREC_PORT   Ray's port there [6379]
#   RAYREC_SSH    command that takes a machine and a shell command [ssh -o BatchMode=yes]
#   RAYREC_START  more options of `ray start`, such as --num-cpus=8
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n 's/^# //p' "$0" | head -2 >&2
  exit 2
fi
IFS=, read -ra machines <<<"$1"
shift
read -ra ssh <<<"${RAYREC_SSH:-ssh -o BatchMode=yes}"
bin=${RAYREC_BIN:-'~/env/bin'}
id=rayrec-ssh-$(date +%s)-$$
logs=$(mktemp -d)

# remote MACHINE NAME COMMAND: runs a shell command there, whose process can be ended by its name
remote() {
  "${ssh[@]}" "$1" "echo \$\$ >/tmp/$id.$2; PATH=$bin:\$PATH; export PATH; exec $3"
}
# end MACHINE NAME: SIGTERM, and a wait for what ends then
end() {
  "${ssh[@]}" "$1" "pid=\$(cat /tmp/$id.$2 2>/dev/null) || exit 0; rm -f /tmp/$id.$2
    kill -TERM \$pid 2>/dev/null; for i in \$(seq 600); do kill -0 \$pid 2>/dev/null || exit 0; sleep 0.2; done; kill -KILL \$pid"
}
end_all() {
  trap - EXIT INT TERM
  end "${machines[0]}" command || true
  local ending=()
  for number in "${!machines[@]}"; do
    end "${machines[$number]}" "ray-$number" &
    ending+=($!)
  done
  wait "${ending[@]}" || true
  rm -rf "$logs"
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# started NUMBER: waits until Ray runs on a machine
started() {
  for _ in $(seq 600); do
    grep -q 'Ray runtime started' "$logs/$1" && return
    kill -0 "${rays[$1]}" 2>/dev/null || break
    sleep 0.2
  done
  echo "run.sh: ${machines[$1]}: Ray does not start: $(tail -n 1 "$logs/$1")" >&2
  exit 1
}

head=${RAYREC_HEAD:-$("${ssh[@]}" "${machines[0]}" "hostname -I" | awk '{print $1}')}
address=$head:${RAYREC_PORT:-6379}
rays=()
for number in "${!machines[@]}"; do
  place="--address=$address"
  [ "$number" != 0 ] || place="--head --port=${address##*:} --node-ip-address=$head --dashboard-host=127.0.0.1"
  remote "${machines[$number]}" "ray-$number" "env RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=1 ray start --block --disable-usage-stats $place ${RAYREC_START:-}" \
    >"$logs/$number" 2>&1 </dev/null &
  rays+=($!)
  [ "$number" != 0 ] || started 0
done
for number in "${!machines[@]}"; do
  started "$number"
done
remote "${machines[0]}" command "env RAY_ADDRESS=$address rayrec $(printf '%q ' "$@")" </dev/null &
wait $!
