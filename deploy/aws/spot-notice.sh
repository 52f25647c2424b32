#!/bin/bash
# Passes AWS's notice that this spot machine ends (about two minutes ahead) on to Ray, which passes it to the run: the workers save.
# Runs beside `ray start`, on every spot machine; ends after the notice. See docs/spot.md.
set -euo pipefail

metadata=${RAYREC_METADATA_URL:-http://169.254.169.254}/latest
every_s=${RAYREC_NOTICE_EVERY_S:-5}

while true; do
  if token=$(curl -sf --max-time 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token") &&
    notice=$(curl -sf --max-time 2 -H "X-aws-ec2-metadata-token: $token" "$metadata/meta-data/spot/instance-action"); then
    at=$(sed -nE 's/.*"time" *: *"([^"]+)".*/\1/p' <<<"$notice")
    left_s=$(($(date -d "$at" +%s) - $(date +%s)))
    echo "$(date '+%F %T')  $notice"
    if ray drain-node --address="${RAY_ADDRESS:-auto}" --reason=DRAIN_NODE_REASON_PREEMPTION --reason-message="AWS takes this spot machine at $at" \
      --deadline-remaining-seconds="$((left_s > 1 ? left_s : 1))"; then
      exit 0
    fi
  fi
  sleep "$every_s"
done
