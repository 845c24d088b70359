// SPDX-License-Identifier: MIT OR Apache-2.0
//! The disk cache on good, damaged and full disks.

use super::*;

fn weight(bytes: &[u8]) -> Arc<OwnedFd> {
    let file = rustix::fs::memfd_create("weight", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    Arc::new(file)
}

fn cached(owner: &str, fnv: u64, bytes: &[u8]) -> Cached {
    let content = Content { len: bytes.len() as u64, hash: *blake3::hash(bytes).as_bytes() };
    Cached { owner: Owner(owner.to_owned()), fnv, content }
}

fn put(cache: &Cache, owner: &str, fnv: u64, bytes: &[u8]) {
    cache.put(cached(owner, fnv, bytes), &weight(bytes));
    cache.flush();
}

fn get(cache: &Cache, owner: &str, len: usize, fnv: u64) -> Option<Vec<u8>> {
    let (content, file, offset) = cache.get(&Owner(owner.to_owned()), len as u64, fnv)?;
    let mut bytes = vec![0; len];
    File::from(file).read_exact_at(&mut bytes, offset).unwrap();
    (*blake3::hash(&bytes).as_bytes() == content.hash).then_some(bytes)
}

fn only_file(folder: &Path) -> PathBuf {
    let owner = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    let mut files: Vec<PathBuf> = fs::read_dir(owner).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

#[test]
fn a_weight_is_there_after_a_restart_and_for_its_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = vec![4; 3 << 20];
    put(&Cache::new(folder.path().into(), 1 << 30), "a", 7, &bytes);
    let again = Cache::new(folder.path().into(), 1 << 30);
    assert_eq!(get(&again, "a", bytes.len(), 7), Some(bytes.clone()));
    assert_eq!(get(&again, "b", bytes.len(), 7), None);
    assert_eq!(get(&again, "a", bytes.len(), 8), None);
    assert_eq!(again.bytes(), bytes.len() as u64 + HEAD_BYTES as u64);
    let mode = fs::metadata(only_file(folder.path()).parent().unwrap()).unwrap().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn a_cut_or_changed_head_or_foreign_file_is_a_miss_and_goes() {
    type Damage = fn(&Path);
    let damages: [Damage; 4] = [
        |path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(500).unwrap(),
        |path| fs::write(path, "").unwrap(),
        |path| fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(&[0xff], 20).unwrap(),
        |path| fs::write(path, vec![0; 1000 + HEAD_BYTES]).unwrap(),
    ];
    for damage in damages {
        let folder = tempfile::tempdir().unwrap();
        put(&Cache::new(folder.path().into(), 1 << 30), "a", 7, &[4; 1000]);
        let path = only_file(folder.path());
        damage(&path);
        let cache = Cache::new(folder.path().into(), 1 << 30);
        assert_eq!(get(&cache, "a", 1000, 7), None);
        assert!(!path.exists());
        assert_eq!(cache.bytes(), 0);
        put(&cache, "a", 7, &[4; 1000]);
        assert_eq!(get(&cache, "a", 1000, 7), Some(vec![4; 1000]));
    }
}

#[test]
fn a_renamed_entry_of_another_owner_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    put(&Cache::new(folder.path().into(), 1 << 30), "a", 7, &[4; 1000]);
    let stolen = folder.path().join(path_of(&Owner("b".into()), 1000, 7));
    fs::create_dir_all(stolen.parent().unwrap()).unwrap();
    fs::rename(folder.path().join(path_of(&Owner("a".into()), 1000, 7)), &stolen).unwrap();
    let cache = Cache::new(folder.path().into(), 1 << 30);
    assert_eq!(get(&cache, "b", 1000, 7), None);
}

#[test]
fn the_least_recently_used_goes_first() {
    let folder = tempfile::tempdir().unwrap();
    let room = 2 * (1000 + HEAD_BYTES as u64);
    let cache = Cache::new(folder.path().into(), room);
    put(&cache, "a", 1, &[1; 1000]);
    put(&cache, "a", 2, &[2; 1000]);
    assert!(get(&cache, "a", 1000, 1).is_some());
    put(&cache, "a", 3, &[3; 1000]);
    assert!(cache.bytes() <= room);
    assert!(get(&cache, "a", 1000, 1).is_some());
    assert_eq!(get(&cache, "a", 1000, 2), None);
    assert!(get(&cache, "a", 1000, 3).is_some());
    put(&cache, "a", 4, &[4; 5000]);
    assert_eq!(get(&cache, "a", 5000, 4), None, "larger than the cache");
    assert!(get(&cache, "a", 1000, 3).is_some());
}

#[test]
fn what_a_killed_writer_left_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    put(&Cache::new(folder.path().into(), 1 << 30), "a", 1, &[1; 1000]);
    let left = only_file(folder.path()).with_file_name(format!("{TEMPORARY}x"));
    fs::write(&left, "half").unwrap();
    let cache = Cache::new(folder.path().into(), 1 << 30);
    assert!(get(&cache, "a", 1000, 1).is_some());
    assert!(!left.exists());
}

#[test]
fn a_full_disk_is_a_miss_and_leaves_nothing_half() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("needs root: a small tmpfs stands for the full disk");
        return;
    }
    let disk = small_tmpfs();
    let folder = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&disk)));
    let cache = Cache::new(folder.join("cache"), 1 << 30);
    put(&cache, "a", 1, &vec![1; 200 << 10]);
    put(&cache, "a", 2, &vec![2; 4 << 20]);
    assert!(get(&cache, "a", 200 << 10, 1).is_some());
    assert_eq!(get(&cache, "a", 4 << 20, 2), None);
    only_file(&folder.join("cache"));
    put(&cache, "a", 3, &[3; 1000]);
    assert!(get(&cache, "a", 1000, 3).is_some(), "there is room for a small one");
}

fn small_tmpfs() -> OwnedFd {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    };
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_set_string(&context, "size", "1m").unwrap();
    fsconfig_create(&context).unwrap();
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap()
}

#[test]
fn a_folder_that_cannot_be_made_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let cache = Cache::new(file.join("cache"), 1 << 30);
    put(&cache, "a", 1, &[1; 1000]);
    assert_eq!(get(&cache, "a", 1000, 1), None);
}
