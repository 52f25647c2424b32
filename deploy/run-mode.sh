#!/bin/sh
# Default command of the image: `demo`, or the recipe that RUN_MODE names, on the log in DATA_DIR; runs go to OUTPUT_DIR. Arguments
# are further flags of `rayrec train`. docs/docker.md.
set -eu
mode=${RUN_MODE:-demo} data=${DATA_DIR:-/data} output=${OUTPUT_DIR:-runs}
case "$mode" in
  demo)
    recipe=criteo_demo data=log/train.txt
    rayrec generate log --rows 100000 --seed 0
    ;;
  kaggle) recipe=criteo_kaggle ;;
  *) recipe=$mode ;;
esac
exec rayrec train "$recipe" --train-data.path "$data" --storage-path "$output" --name "${RUN_NAME:-$mode}" "$@"
