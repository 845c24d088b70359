// SPDX-License-Identifier: MIT OR Apache-2.0
//! What must hold for every input: no bytes make the parser panic, what is written reads back the same, and
//! the lowest version is one that readers accept while no lower one is.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test states what must hold")]

use std::collections::BTreeMap;

use lighter_cdi::{
    ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, NetDevice, NodeType, Spec, Version,
    parse_bytes,
};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;

/// Texts of every kind of character, short enough for a key.
fn text() -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..12).prop_map(|characters| characters.into_iter().collect())
}

fn filled() -> impl Strategy<Value = String> {
    (any::<char>(), text()).prop_map(|(first, rest)| format!("{first}{rest}"))
}

fn variables() -> impl Strategy<Value = Vec<String>> {
    let name = filled().prop_filter("a name", |name| !name.starts_with('='));
    vec((name, text()).prop_map(|(name, value)| format!("{name}={value}")), 0..3)
}

fn annotations() -> impl Strategy<Value = BTreeMap<String, String>> {
    btree_map(text(), text(), 0..3)
}

fn node_type() -> impl Strategy<Value = NodeType> {
    prop_oneof![
        Just(NodeType::Block),
        Just(NodeType::Character),
        Just(NodeType::Unbuffered),
        Just(NodeType::Fifo)
    ]
}

fn device_node() -> impl Strategy<Value = DeviceNode> {
    (
        (filled(), option::of(filled()), option::of(node_type())),
        (any::<i64>(), any::<i64>(), option::of(any::<u32>())),
        (option::of("none|[rwm]{1,4}"), option::of(any::<u32>()), option::of(any::<u32>())),
    )
        .prop_map(
            |((path, host_path, node_type), (major, minor, file_mode), (permissions, uid, gid))| DeviceNode {
                path,
                host_path,
                node_type,
                major,
                minor,
                file_mode,
                permissions,
                uid,
                gid,
            },
        )
}

fn mount() -> impl Strategy<Value = Mount> {
    (filled(), filled(), vec(text(), 0..3), option::of(filled())).prop_map(
        |(host_path, container_path, options, fs_type)| Mount { host_path, container_path, options, fs_type },
    )
}

fn hook() -> impl Strategy<Value = Hook> {
    let name = prop_oneof![
        Just(HookName::Prestart),
        Just(HookName::CreateRuntime),
        Just(HookName::CreateContainer),
        Just(HookName::StartContainer),
        Just(HookName::Poststart),
        Just(HookName::Poststop),
    ];
    (name, filled(), vec(text(), 0..3), variables(), option::of(any::<i64>()))
        .prop_map(|(hook_name, path, args, env, timeout_s)| Hook { hook_name, path, args, env, timeout_s })
}

fn intel_rdt() -> impl Strategy<Value = IntelRdt> {
    ("[a-z]{0,8}", text(), text(), option::of(vec(text(), 0..2)), any::<bool>()).prop_map(
        |(clos_id, l3_cache_schema, mem_bw_schema, schemata, enable_monitoring)| IntelRdt {
            clos_id,
            l3_cache_schema,
            mem_bw_schema,
            schemata,
            enable_monitoring,
        },
    )
}

fn net_devices() -> impl Strategy<Value = Vec<NetDevice>> {
    let distinct = || btree_set(filled(), 2);
    let pairs = (distinct(), distinct()).prop_map(|(hosts, names)| {
        let device = |(host_interface_name, name)| NetDevice { host_interface_name, name };
        hosts.into_iter().zip(names).map(device).collect()
    });
    prop_oneof![3 => Just(Vec::new()), 1 => pairs]
}

fn edits() -> impl Strategy<Value = ContainerEdits> {
    (
        (variables(), vec(device_node(), 0..2), net_devices()),
        (vec(hook(), 0..2), vec(mount(), 0..3)),
        (option::weighted(0.2, intel_rdt()), prop_oneof![Just(Vec::new()), vec(any::<u32>(), 0..3)]),
    )
        .prop_map(|((env, device_nodes, net_devices), (hooks, mounts), (intel_rdt, additional_gids))| {
            ContainerEdits { env, device_nodes, net_devices, hooks, mounts, intel_rdt, additional_gids }
        })
}

/// Valid specs of every kind, of the lowest version.
fn spec() -> impl Strategy<Value = Spec> {
    let kind = "[a-z]([a-z0-9._-]{0,6}[a-z0-9])?/[a-z]([a-z0-9._-]{0,6}[a-z0-9])?";
    let device = (annotations(), edits().prop_filter("an edit", |edits| !edits.is_unset()));
    let devices = btree_map("[a-zA-Z0-9]([a-z0-9.:_-]{0,6}[a-z0-9])?", device, 1..4);
    (kind, annotations(), edits(), devices).prop_map(|(kind, annotations, container_edits, devices)| {
        let mut spec = Spec::new(kind.parse().unwrap());
        spec.annotations = annotations;
        spec.container_edits = container_edits;
        spec.devices = devices
            .into_iter()
            .map(|(name, (annotations, edits))| Device {
                annotations,
                ..Device::new(name.parse().unwrap(), edits)
            })
            .collect();
        spec.with_lowest_version()
    })
}

/// Pieces of YAML and of specs, so that random texts get past the first line.
fn yaml_like() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "cdiVersion: ",
        "kind: ",
        "devices:",
        "name: ",
        "containerEdits: ",
        "env: ",
        "deviceNodes: ",
        "mounts: ",
        "a/b",
        "1.1.0",
        "A=1",
        "\"",
        "'",
        "[",
        "]",
        "{",
        "}",
        ",",
        ": ",
        "- ",
        "? ",
        "\n",
        "\n  ",
        "\n    ",
        "\t",
        "&a ",
        "*a",
        "<<: ",
        "!!str ",
        "!!int ",
        "!x ",
        "|\n",
        ">-\n",
        "#",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "~",
        "0x1f",
        "-1",
        "1e400",
        "99999999999999999999",
        ".nan",
        "\u{feff}",
        "\r",
        "\\u12",
        "é",
        "null",
    ]);
    vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_bytes_make_the_parser_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = parse_bytes(&bytes);
    }

    #[test]
    fn no_yaml_makes_the_parser_panic(text in yaml_like()) {
        let _ = parse_bytes(text.as_bytes());
    }

    #[test]
    fn no_damage_to_a_spec_makes_the_parser_panic(
        spec in spec(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
    ) {
        let mut bytes = spec.to_json().unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if cut {
            bytes.truncate(at);
        }
        let _ = parse_bytes(&bytes);
    }

    #[test]
    fn what_is_written_reads_back(spec in spec()) {
        prop_assert_eq!(parse_bytes(&spec.to_json().unwrap()), Ok(spec.clone()));
        // Plain JSON readers see the same.
        prop_assert_eq!(serde_json::from_slice::<Spec>(&spec.to_json().unwrap()).unwrap(), spec);
    }

    #[test]
    fn the_lowest_version_is_accepted_and_no_lower_one(spec in spec()) {
        let lowest = spec.lowest_version();
        prop_assert_eq!(spec.cdi_version, lowest);
        for version in Version::ALL {
            let mut other = spec.clone();
            other.cdi_version = version;
            prop_assert_eq!(other.lowest_version(), lowest);
            prop_assert_eq!(parse_bytes(&other.to_json().unwrap()).is_ok(), version >= lowest);
        }
    }
}
