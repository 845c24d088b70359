// SPDX-License-Identifier: MIT OR Apache-2.0
//! The weight store against honest and dishonest workers.

use std::cell::Cell;

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

fn upload(bytes: &[u8]) -> OwnedFd {
    let file = memfd_create("upload", MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    file
}

fn key(bytes: &[u8]) -> WeightKey {
    WeightKey { len: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() }
}

fn store(bytes: u64) -> Arc<WeightStore> {
    Arc::new(WeightStore::new(Backing::Memfd, Limits { bytes, count: 3 }, None))
}

fn user(store: &Arc<WeightStore>, worker: u64, owner: &str) -> Holder {
    store.holder(worker, &Owner(owner.to_owned()), 1 << 30)
}

fn content(file: &OwnedFd, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(file, &mut *bytes, 0).unwrap(), len);
    bytes
}

const GO_ON: Cancelled<'static> = &|| false;

#[test]
fn two_owners_hold_one_copy_and_it_goes_with_the_last() {
    let store = store(1 << 30);
    let bytes = vec![3; 100_000];
    let (a, b) = (user(&store, 1, "a"), user(&store, 2, "b"));
    let first = a.keep(&key(&bytes), 11, upload(&bytes), GO_ON).unwrap();
    b.keep(&key(&bytes), 11, upload(&bytes), GO_ON).unwrap();
    assert_eq!(content(&first, bytes.len()), bytes);
    assert_eq!(store.totals(), Totals { count: 1, bytes: 100_000, saved_bytes: 100_000 });
    drop(a);
    assert_eq!(store.totals(), Totals { count: 1, bytes: 100_000, saved_bytes: 0 });
    drop(b);
    assert_eq!(store.totals(), Totals { count: 0, bytes: 0, saved_bytes: 0 });
}

#[test]
fn a_hash_query_is_answered_from_the_same_owners_uploads_only() {
    let store = store(1 << 30);
    let bytes = vec![9; 70_000];
    let uploader = user(&store, 1, "project");
    uploader.keep(&key(&bytes), 42, upload(&bytes), GO_ON).unwrap();
    let sibling = user(&store, 2, "project");
    let stranger = user(&store, 3, "other");
    assert!(stranger.find(70_000, 42, GO_ON).is_none());
    assert!(sibling.find(70_000, 43, GO_ON).is_none());
    assert!(sibling.find(70_001, 42, GO_ON).is_none());
    assert_eq!(content(&sibling.find(70_000, 42, GO_ON).unwrap(), 70_000), bytes);
    drop(uploader);
    assert_eq!(store.totals().count, 1);
    drop(sibling);
    assert!(user(&store, 4, "project").find(70_000, 42, GO_ON).is_none());
}

#[test]
fn naming_a_hash_does_not_open_the_content() {
    let store = store(1 << 30);
    let secret = vec![1; 5000];
    let uploader = user(&store, 1, "a");
    uploader.keep(&key(&secret), 1, upload(&secret), GO_ON).unwrap();
    let thief = user(&store, 2, "b");
    let other = vec![0; 5000];
    let result = thief.keep(&key(&secret), 1, upload(&other), GO_ON);
    assert!(matches!(result, Err(WeightError::Hash { len: 5000 })));
    assert!(thief.find(5000, 1, GO_ON).is_none());
    assert_eq!(store.totals().saved_bytes, 0);
    drop(uploader);
}

#[test]
fn bad_keys_and_descriptors_are_refused() {
    let store = store(1 << 30);
    let holder = user(&store, 1, "a");
    let bytes = [5; 300];
    for bad in ["", "zz", &"0".repeat(63), &"g".repeat(64)] {
        let key = WeightKey { len: 300, blake3: bad.to_owned() };
        assert!(matches!(holder.keep(&key, 0, upload(&bytes), GO_ON), Err(WeightError::Key { .. })), "{bad}");
    }
    let empty = WeightKey { len: 0, ..key(&[]) };
    assert!(matches!(holder.keep(&empty, 0, upload(&[]), GO_ON), Err(WeightError::Key { .. })));
    let longer = WeightKey { len: 301, ..key(&bytes) };
    assert!(matches!(
        holder.keep(&longer, 0, upload(&bytes), GO_ON),
        Err(WeightError::Descriptor { len: 301 })
    ));
    let huge = WeightKey { len: u64::MAX, ..key(&bytes) };
    assert!(holder.keep(&huge, 0, upload(&bytes), GO_ON).is_err());
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(holder.keep(&key(&bytes), 0, pipe, GO_ON), Err(WeightError::Descriptor { .. })));
    let zero = std::fs::File::open("/dev/zero").unwrap();
    assert!(holder.keep(&key(&bytes), 0, zero, GO_ON).is_err());
    assert_eq!(store.totals().count, 0);
}

#[test]
fn an_upload_that_shrinks_during_the_copy_is_refused() {
    let store = store(1 << 30);
    let holder = user(&store, 1, "a");
    let bytes = vec![2; 3 * CHUNK_BYTES];
    let file = upload(&bytes);
    let asked = Cell::new(0);
    let shrink = || {
        asked.set(asked.get() + 1);
        if asked.get() == 2 {
            rustix::fs::ftruncate(&file, 10).unwrap();
        }
        false
    };
    assert!(matches!(holder.keep(&key(&bytes), 0, &file, &shrink), Err(WeightError::Read(_))));
    assert_eq!(store.totals().count, 0);
}

#[test]
fn an_upload_that_changes_during_the_copy_is_refused() {
    let store = store(1 << 30);
    let holder = user(&store, 1, "a");
    let bytes = vec![2; 3 * CHUNK_BYTES];
    let file = upload(&bytes);
    let change = || {
        rustix::io::pwrite(&file, b"x", 2 * CHUNK_BYTES as u64).unwrap();
        false
    };
    assert!(matches!(holder.keep(&key(&bytes), 0, &file, &change), Err(WeightError::Hash { .. })));
    assert_eq!(store.totals().count, 0);
}

#[test]
fn a_later_change_of_the_upload_does_not_reach_the_copy() {
    let store = store(1 << 30);
    let holder = user(&store, 1, "a");
    let bytes = vec![2; 1000];
    let file = upload(&bytes);
    let kept = holder.keep(&key(&bytes), 0, &file, GO_ON).unwrap();
    rustix::io::pwrite(&file, &[9; 1000], 0).unwrap();
    assert_eq!(content(&kept, 1000), bytes);
}

#[test]
fn the_limit_holds_and_a_cancelled_copy_leaves_nothing() {
    let store = store(1500);
    let holder = user(&store, 1, "a");
    let (one, two) = (vec![1; 1000], vec![2; 1000]);
    holder.keep(&key(&one), 1, upload(&one), GO_ON).unwrap();
    assert!(matches!(
        holder.keep(&key(&two), 2, upload(&two), GO_ON),
        Err(WeightError::Full { limit: 1500 })
    ));
    // What is there already costs nothing more.
    user(&store, 2, "b").keep(&key(&one), 1, upload(&one), GO_ON).unwrap();
    drop(holder);
    let holder = user(&store, 3, "c");
    assert!(matches!(holder.keep(&key(&two), 2, upload(&two), &|| true), Err(WeightError::Cancelled)));
    assert_eq!(store.totals().count, 0);
}

#[test]
fn a_worker_holds_no_more_than_its_quota_whatever_it_says() {
    let store = store(1 << 30);
    let small = store.holder(1, &Owner("a".to_owned()), 2500);
    let other = user(&store, 2, "a");
    let weights: Vec<Vec<u8>> = (1..=3).map(|byte| vec![byte; 1000]).collect();
    for (number, bytes) in weights.iter().enumerate() {
        other.keep(&key(bytes), number as u64, upload(bytes), GO_ON).unwrap();
    }
    small.keep(&key(&weights[0]), 0, upload(&weights[0]), GO_ON).unwrap();
    assert!(small.find(1000, 1, GO_ON).is_some());
    assert!(small.find(1000, 2, GO_ON).is_none());
    let result = small.keep(&key(&weights[2]), 2, upload(&weights[2]), GO_ON);
    assert!(matches!(result, Err(WeightError::Quota { limit: 2500 })));
    let fourth = vec![4; 10];
    let result = other.keep(&key(&fourth), 4, upload(&fourth), GO_ON);
    assert!(matches!(result, Err(WeightError::TooMany { limit: 3 })));
}
