#!/usr/bin/env bash
# Measures the rows of the first table of docs/performance.md on this machine. Runs their scripts one
# after the other on cores 0 and 1.
#
#   benchmarks/two_cores.sh [--dry-run] [--out DIR]
#
#   --dry-run  print the commands that would run, and do nothing
#   --out      output folder, runs/two-cores by default; finished quickstart runs in it are reused
# Takes 40 minutes, during which nothing else should run on the machine. Needs the extras parity and
# gym, and MATH in the folder BACR_SHARED_DATA. The commands and the last line of their output are
# written to DIR/results.txt, and the values of every row to DIR/NAME.json, which can be copied to
# benchmarks/baselines/NAME-MACHINE.json. Older JSON files of DIR are deleted.

set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
. "$here/../recipes/steps.sh"

out=runs/two-cores
read_options "$@"
[ ${#keys[@]} = 0 ] || die "command line: found '${keys[0]}'; see --help"

# Runs a benchmark script with its options, and appends the last line of its output to the results.
# The first argument names the record.
row() {
  [ "$dry_run" = 1 ] || rm -f "$out/$1.json"
  step taskset -c 0,1 env JAX_PLATFORMS=cpu "$python" "$here/$2" "${@:3}" --record "$out/$1.json" | tee "$kept"
  [ "$dry_run" = 1 ] || { echo "${*:2}" && tail -n 1 "$kept"; } >>"$out/results.txt"
}

kept=/dev/null
if [ "$dry_run" = 0 ]; then
  mkdir -p "$out"
  kept="$out/last.txt"
  lscpu | grep -E 'Model name|CPU family' | tee "$out/results.txt"
fi
for round in 1 2 3; do row "forward-$round" forward.py; done
row rollout rollout.py
row grading grading.py
row early_grading early_grading.py
row learner learner.py --rounds 9
row step_beside_trl step_beside_trl.py --folder "$out/beside-trl" --rounds 15
row step step.py --model "$out/beside-trl/model" --prompts "$out/beside-trl/prompts.jsonl" --threads 1
row quickstart quickstart.py --seeds 0 1 2 --out "$out/quickstart"
row starts starts.py --run "$out/quickstart/bacr-0"
