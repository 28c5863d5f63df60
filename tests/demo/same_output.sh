#!/bin/sh
# same_output.sh CUSHION PROGRAM [ARGUMENTS]: a program's standard output and exit status are the same natively and
# under Cushion, and Cushion served it.
set -u
cushion=$1
shift
report=$(mktemp --suffix=.json)
trap 'rm -f "$report"' EXIT
native=$("$@" 2>/dev/null)
native_status=$?
served=$("$cushion" run --report "$report" -- "$@" 2>/dev/null)
served_status=$?
printf 'natively (exit %s):\n%s\nunder Cushion (exit %s):\n%s\n' "$native_status" "$native" "$served_status" "$served"
[ "$native_status" -eq 0 ] && [ "$native_status" -eq "$served_status" ] && [ "$native" = "$served" ] || exit 1
grep -Eq '"served": *[1-9]' "$report" || { echo "the report names no served call:"; cat "$report"; exit 1; }
