// SPDX-License-Identifier: MIT OR Apache-2.0
//! The store of models against honest and dishonest containers.

use lighter_frames::Element;

use super::*;

fn memfd(bytes: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("upload", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

fn hash(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

fn take(models: &Models, bytes: &[u8]) -> Result<Arc<ModelFile>, ModelError> {
    let room = models.room(bytes.len() as u64)?;
    models.take_file(room, memfd(bytes, SEALS), hash(bytes), &|| false)
}

fn content(file: &ModelFile) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.bytes).unwrap()];
    rustix::io::pread(&file.file, &mut *bytes, 0).unwrap();
    bytes
}

#[test]
fn a_sealed_file_is_taken_and_found_again() {
    let models = Models::new(1 << 20, 8);
    let bytes = vec![7; 5000];
    assert!(models.find(&hash(&bytes), 5000).is_none());
    take(&models, &bytes).unwrap();
    assert_eq!(content(&models.find(&hash(&bytes), 5000).unwrap()), bytes);
    assert!(models.find(&hash(&bytes), 5001).is_none(), "another length is another model");
    assert_eq!(models.bytes(), 5000);
}

#[test]
fn a_file_that_can_change_is_refused() {
    let models = Models::new(1 << 20, 8);
    let bytes = vec![7; 5000];
    let all = [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW];
    for missing in all {
        let seals = all.into_iter().filter(|seal| *seal != missing).fold(SealFlags::empty(), |a, b| a | b);
        let room = models.room(5000).unwrap();
        let error = models.take_file(room, memfd(&bytes, seals), hash(&bytes), &|| false).unwrap_err();
        assert!(matches!(error, ModelError::Seals { .. }), "{error}");
    }
    let room = models.room(5000).unwrap();
    let plain = OwnedFd::from(tempfile::tempfile().unwrap());
    assert!(matches!(models.take_file(room, plain, hash(&bytes), &|| false), Err(ModelError::Seals { .. })));
    let room = models.room(5000).unwrap();
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(models.take_file(room, pipe, hash(&bytes), &|| false).is_err());
    assert_eq!(models.bytes(), 0, "room is given back");
}

#[test]
fn lies_about_length_and_hash_are_refused() {
    let models = Models::new(1 << 20, 8);
    let bytes = vec![7; 5000];
    let room = models.room(4999).unwrap();
    let result = models.take_file(room, memfd(&bytes, SEALS), hash(&bytes), &|| false);
    assert!(matches!(result, Err(ModelError::Length { found: 5000, said: 4999 })));
    let room = models.room(5000).unwrap();
    let result = models.take_file(room, memfd(&bytes, SEALS), [0; 32], &|| false);
    assert!(matches!(result, Err(ModelError::Hash)));
    let room = models.room(5000).unwrap();
    assert!(matches!(models.take_stream(room, &mut bytes.as_slice(), [0; 32]), Err(ModelError::Hash)));
    assert_eq!(models.bytes(), 0);
}

#[test]
fn a_stream_is_kept_in_a_file_that_nobody_can_change() {
    let models = Models::new(8 << 20, 8);
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| at.to_le_bytes()[1]).collect();
    let room = models.room(bytes.len() as u64).unwrap();
    let file = models.take_stream(room, &mut bytes.as_slice(), hash(&bytes)).unwrap();
    assert_eq!(content(&file), bytes);
    check_seals(&file.file).unwrap();
    assert!(rustix::io::pwrite(&file.file, b"x", 0).is_err());
    let room = models.room(100).unwrap();
    let cut = models.take_stream(room, &mut [0u8; 50].as_slice(), [0; 32]);
    assert!(matches!(cut, Err(ModelError::Read(_))));
    assert_eq!(models.bytes(), 3_000_000);
}

#[test]
fn limits_hold_and_the_unused_go_first() {
    let models = Models::new(2500, 3);
    let (a, b, c) = (vec![1; 1000], vec![2; 1000], vec![3; 1000]);
    let used = take(&models, &a).unwrap();
    drop(take(&models, &b).unwrap());
    drop(take(&models, &c).unwrap());
    assert!(models.find(&hash(&a), 1000).is_some());
    assert!(models.find(&hash(&b), 1000).is_none(), "made room");
    let both = [used, models.find(&hash(&c), 1000).unwrap()];
    assert!(matches!(take(&models, &b), Err(ModelError::Bytes { bytes: 1000, limit: 2500 })));
    assert!(matches!(models.room(u64::MAX), Err(ModelError::Bytes { .. })));
    drop(both);
    let few = Models::new(2500, 1);
    let _used = take(&few, &[1; 10]).unwrap();
    assert!(matches!(take(&few, &[2; 10]), Err(ModelError::Count { limit: 1 })));
}

#[test]
fn the_same_model_twice_at_once_is_one() {
    let models = Models::new(2500, 3);
    let bytes = vec![1; 1000];
    let (first, second) = (models.room(1000).unwrap(), models.room(1000).unwrap());
    let one = models.take_file(first, memfd(&bytes, SEALS), hash(&bytes), &|| false).unwrap();
    let two = models.take_file(second, memfd(&bytes, SEALS), hash(&bytes), &|| false).unwrap();
    assert!(Arc::ptr_eq(&one, &two));
    assert_eq!(models.bytes(), 1000);
}

#[test]
fn equal_bytes_with_other_ports_or_pins_are_other_models() {
    let port = |name: &str, dims| Port { name: name.to_owned(), element: Element::F32, dims };
    let model = |inputs| Model {
        hash: [1; 32],
        proto_bytes: 10,
        weights_bytes: 0,
        inputs,
        outputs: vec![port("y", None)],
        label: "a name".to_owned(),
    };
    let plain = model(vec![port("a", None), port("b", None)]);
    let swapped = model(vec![port("b", None), port("a", None)]);
    let shaped = model(vec![port("a", Some(vec![Dim::Free])), port("b", None)]);
    let scalar = model(vec![port("a", Some(Vec::new())), port("b", None)]);
    let of = |model| identity(&[1; 32], model, None);
    let all = [of(&plain), of(&swapped), of(&shaped), of(&scalar), identity(&[1; 32], &plain, Some("cpu"))];
    for (at, one) in all.iter().enumerate() {
        assert!(all.iter().skip(at + 1).all(|other| other != one), "{at}");
    }
    let renamed = Model { label: String::new(), ..plain.clone() };
    assert_eq!(of(&plain), of(&renamed));
}
