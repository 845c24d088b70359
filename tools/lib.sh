# SPDX-License-Identifier: MIT OR Apache-2.0
# Shared by the scripts of this folder: where the cache is, and how they speak.
# Sourced, never run. Refuses nothing; the callers do.
# shellcheck shell=bash

# These are read by the scripts that source this file. The folder may be a copy of this one alone: `lighter setup` brings
# what it needs of it.
# shellcheck disable=SC2034
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(dirname "$tools")
cache=${LIGHTER_CACHE:-$repo/.cache}
program=$(basename "$0")

# One line about what goes on. On stderr: stdout belongs to results.
say() { printf '%s: %s\n' "$program" "$*" >&2; }

# An error names the thing, the cause and the remedy.
die() {
	printf '%s: error: %s\n' "$program" "$*" >&2
	exit 1
}

# Prints this script's leading comment, its manual.
usage() { awk 'NR > 2 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"; }

need_root() { [ "$(id -u)" = 0 ] || die "$1 needs root: run it with sudo"; }

# need_program PROGRAM PACKAGE: installs the package when the program is missing, and says so.
need_program() {
	command -v "$1" >/dev/null && return
	need_root "installing $2 (for $1)"
	say "$1 is missing: installing the package $2 with apt-get"
	DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$2" >&2 ||
		{ apt-get -qq update >&2 && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "$2" >&2; } ||
		die "cannot install $2: install it by hand, then run this again"
}

# need_pip: the same for pip, which belongs to the python3 that runs.
need_pip() {
	need_program python3 python3
	python3 -m pip --version >/dev/null 2>&1 || need_program pip3 python3-pip
}

# exclusively LOCK_FILE: waits until no other run of the same step holds the lock, which ends with this process.
exclusively() {
	mkdir -p "$(dirname "$1")"
	exec {lock_fd}>"$1"
	flock --nonblock "$lock_fd" || {
		say "waiting for another run to finish ($1)"
		flock "$lock_fd"
	}
}

# size PATH: how much disk it takes, for people.
size() { du -sh "$1" | cut -f1; }

# The Debian suite whose Python is of this machine's version, so that wheels fetched here fit an image of it.
python_suite() {
	need_program python3 python3
	case $(python3 -c 'import sys; print(sys.version_info[1])') in
	11) echo bookworm ;;
	13) echo trixie ;;
	*) echo sid ;;
	esac
}

# The Python whose torch computes in the tests of the mps device: workers are other users, so it lies where they can read.
torch_python() {
	local mine system
	need_program python3 python3
	mine=$(python3 -c 'import sys; print(sys.version_info[:2])')
	system=$(/usr/bin/python3 -c 'import sys; print(sys.version_info[:2])' 2>/dev/null || true)
	if [ "$mine" = "$system" ]; then echo /usr/bin/python3; else python3 -c 'import sys; print(sys.executable)'; fi
}

# mps_packages FOLDER: builds the core of lighter-mps, and packs it with the rest into the folder.
mps_packages() {
	local host
	host=$(rustc -vV | sed -n 's/^host: //p')
	# A container's Python loads it whatever this Python is: abi3.
	cargo rustc --locked --profile core --target "$host" -p lighter-mps-core --lib --crate-type cdylib >&2
	"$tools/mps-wheels" "$1" "${CARGO_TARGET_DIR:-$repo/target}/$host/core/liblighter_mps_core.so" >/dev/null
}

# write_section NAME: puts standard input into docs/benchmarks.md, in the place of the section that had the name.
write_section() {
	local name=$1 file=$repo/docs/benchmarks.md new
	new=$(mktemp "$file.XXXXXX")
	cat >"$new.section"
	awk -v name="$name" -v section="$new.section" '
		$0 == "<!-- " name " -->" { print; print ""; while ((getline line < section) > 0) print line; print ""; skip = 1 }
		$0 == "<!-- /" name " -->" { skip = 0 }
		!skip { print }
	' "$file" >"$new"
	rm "$new.section"
	grep -qx "<!-- /$name -->" "$new" || die "$file has no section $name: put its two comment lines back"
	chmod 644 "$new"
	mv "$new" "$file"
}
