# Functions that the recipes source, to parse options and to print and run commands.
#
# Every recipe has the options --dry-run (only print the commands), --out DIR (the output folder) and
# --help. The variable PYTHON selects the Python interpreter.

# Defines die, show_help and needs_value.
. "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"

python="${PYTHON:-python}" dry_run=0 keys=()

# Parses the options that all recipes share. Sets out, dry_run, and keys (the config overrides).
read_options() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --out) needs_value "$1" $#; out="$2"; shift 2 ;;
      --dry-run) dry_run=1; shift ;;
      -h | --help) show_help "$0"; exit 0 ;;
      *=*) add_key "$1"; shift ;;
      *) die "command line: found '$1'; see --help" ;;
    esac
  done
}

# Adds an override of the training config to keys. The later steps of a recipe read the run in $out.
add_key() {
  local word="${1//[[:space:]\"\']/}"
  case "$word" in
    output.dir=* | output={dir:* | output={*,dir:*) die "$1: a recipe has its own output folder; use --out DIR" ;;
  esac
  keys+=("$1")
}

# Runs bacr with the selected interpreter, because the command `bacr` may not be on the PATH.
bacr() { "$python" -m bacr_jax "$@"; }

# Prints a command, and runs it unless --dry-run is set.
step() {
  printf '%q ' "$@" | sed 's/ $//'
  echo
  [ "$dry_run" = 1 ] || "$@"
}
