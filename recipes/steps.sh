# Sourced by the recipes: how a step is shown and run.
#
# Every recipe takes --dry-run (print the commands and do nothing), --out DIR (where everything goes)
# and --help. PYTHON chooses another interpreter.

die() {
  echo "error: $1" >&2
  exit 2
}

# The header of script $1: its comment lines up to the first blank one.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$1"
}

# The value that option $1 needs ($# of the rest in $2).
needs_value() {
  [ "$2" -ge 2 ] || die "$1: a value is missing; see --help"
}

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

# Shows a command, and runs it unless --dry-run was given.
step() {
  printf '%q ' "$@" | sed 's/ $//'
  echo
  [ "$dry_run" = 1 ] || "$@"
}
