# SPDX-License-Identifier: MIT OR Apache-2.0
# A daemon with folders of its own beside the test engine, for the demo, the examples and the benchmarks.
# Sourced after lib.sh, never run.
# shellcheck shell=bash

# private_daemon DEVICE SETTINGS: builds lighter, starts the test engine, and writes the configuration of a daemon that
# offers this device with these settings, in which @home@ stands for a folder that ends with it. It ends with the script, and so does the engine with the script's containers.
private_daemon() {
	local device=$1 settings=$2 socket other
	need_root "a private Docker"
	"$tools/toolchain"
	dist=$("$tools/build" release)
	home=$(mktemp -d /tmp/lighter-XXXXXX)
	# Containers of other users look into the client folder below it.
	chmod 755 "$home"
	trap end_private_daemon EXIT
	socket=$("$tools/engine" start)
	cdi=$(dirname "$socket")/cdi
	{
		cat <<-END
			[daemon]
			state_dir = "$home/state"
			spec_dir = "$cdi"
			client_dir = "$home/client"
			log_file = "$home/log"
			[engines]
			docker = ["$socket"]
			[devices]
		END
		for other in gpu metal ane mps; do [ "$other" = "$device" ] || printf '%s = false\n' "$other"; done
		printf '[%s]\n%s\n' "$device" "${settings//@home@/$home}"
	} >"$home/config.toml"
}

end_private_daemon() {
	local ids
	ids=$(docker ps --all --quiet 2>/dev/null) || true
	# shellcheck disable=SC2086
	[ -z "$ids" ] || docker rm -f $ids >/dev/null 2>&1 || true
	lighter stop >/dev/null 2>&1 || true
	rm -f "$cdi"/lighter.sh-*.json
	"$tools/engine" stop >/dev/null 2>&1 || true
	rm -rf "$home"
}

docker() { "$tools/engine" docker "$@"; }
lighter() { "$dist/lighter" --config "$home/config.toml" "$@"; }
