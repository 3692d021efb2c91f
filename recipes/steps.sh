# Sourced by the recipes: how a step is shown and run.
#
# Every recipe takes --dry-run (print the commands and do nothing), --out DIR (where everything goes)
# and --help. PYTHON chooses another interpreter.

# For die, show_help and needs_value.
. "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"

python="${PYTHON:-python}" dry_run=0 keys=()

# The options of a recipe that has no others: sets out, dry_run and the keys of a config.
read_options() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --out) needs_value "$1" $#; out="$2"; shift 2 ;;
      --dry-run) dry_run=1; shift ;;
      -h | --help) show_help "$0"; exit 0 ;;
      *=*) keys+=("$1"); shift ;;
      *) die "command line: found '$1'; see --help" ;;
    esac
  done
}

# Runs the project's commands by the chosen interpreter, because `bacr` may not be on the path.
bacr() { "$python" -m bacr_jax "$@"; }

# Shows a command, and runs it unless --dry-run was given.
step() {
  printf '%q ' "$@" | sed 's/ $//'
  echo
  [ "$dry_run" = 1 ] || "$@"
}
