use std::fs::{self, File};
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use flate2::Compression;
use flate2::write::GzEncoder;
use zeroize::Zeroizing;

use super::needles::Needles;
use super::scan::NeedleScan;
use super::{Effort, Match, MatchKind, Searched, SearchedFiles, Writers, search_tree};
use crate::model::{Encoding, LayerId, Place, Timestamp};
use crate::store::{Store, StoreOptions};

const VALUE: &str = "s3cr3t/Value+with?odd=chars&more";
const OTHER: &str = "tok_1234567890abcdef";

fn needles() -> Needles {
    named(&[("API", VALUE), ("TOKEN", OTHER)])
}

fn named(secrets: &[(&str, &str)]) -> Needles {
    let secrets: Vec<_> = secrets
        .iter()
        .map(|(name, value)| ((*name).to_owned(), Zeroizing::new((*value).to_owned())))
        .collect();
    Needles::new(&secrets)
}

fn search(root: &Path, needles: &Needles) -> Searched {
    search_tree(root, needles, Writers::None, &SearchedFiles::default(), None).unwrap()
}

fn find_in(needles: &Needles, content: &[u8]) -> Vec<(String, Place, Encoding)> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), content).unwrap();
    search(dir.path(), needles).finds.iter().filter_map(secret).collect()
}

fn secret(find: &Match) -> Option<(String, Place, Encoding)> {
    match &find.what {
        MatchKind::Secret { name, place, encoding, .. } => Some((name.clone(), *place, *encoding)),
        MatchKind::Unsearched { .. } => None,
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn tar_of(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

fn zip_of(members: &[(&str, &[u8])], method: zip::CompressionMethod) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default().compression_method(method);
    for (name, content) in members {
        writer.start_file(*name, options).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// A zip written to a pipe: sizes come after the members.
fn streamed_zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new_stream(Vec::new());
    let options = zip::write::SimpleFileOptions::default();
    for (name, content) in members {
        writer.start_file(*name, options).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn wrapped(text: &str, width: usize, indent: &str, end: &str) -> String {
    let lines = text.as_bytes().chunks(width).map(|line| String::from_utf8_lossy(line));
    lines.map(|line| format!("{indent}{line}{end}")).collect()
}

#[test]
fn every_way_to_write_a_value() {
    let needles = needles();
    let percent: String = VALUE.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let component = VALUE
        .replace('%', "%25")
        .replace('/', "%2F")
        .replace('+', "%2B")
        .replace('?', "%3F")
        .replace('=', "%3D")
        .replace('&', "%26");
    let hex: String = VALUE.bytes().map(|byte| format!("{byte:02x}")).collect();
    let cases = [
        ("as it is", VALUE.to_owned(), Some(Encoding::Plain)),
        ("percent-encoded", component.clone(), Some(Encoding::Url)),
        ("in lower case", component.to_lowercase().replace("value", "Value"), Some(Encoding::Url)),
        ("in hexadecimal", hex.clone(), Some(Encoding::Hex)),
        ("in upper case", hex.to_uppercase(), Some(Encoding::Hex)),
        ("in lines of 60", wrapped(&hex, 60, "", "\n"), Some(Encoding::Hex)),
        ("not quite", VALUE.replace("odd", "odb"), None),
        ("every byte escaped, which nobody does", percent, None),
    ];
    for (what, text, encoding) in cases {
        let found = find_in(&needles, format!("before {text} after").as_bytes());
        let expected: Vec<_> =
            encoding.map(|e| ("API".to_owned(), Place::Contents, e)).into_iter().collect();
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn base64_in_all_places_alphabets_and_line_lengths() {
    let needles = needles();
    for before in 0..7 {
        let text = format!("{}{VALUE}{}", "x".repeat(before), "y".repeat(5));
        for encoded in [STANDARD.encode(&text), URL_SAFE_NO_PAD.encode(&text)] {
            let shapes = [
                encoded.clone(),
                wrapped(&encoded, 76, "", "\n"),
                wrapped(&encoded, 64, "    ", "\r\n"),
                wrapped(&encoded, 64, "", "\\n"),
            ];
            for shape in shapes {
                let found = find_in(&needles, shape.as_bytes());
                let expected = vec![("API".to_owned(), Place::Contents, Encoding::Base64)];
                assert_eq!(found, expected, "{before} before: {shape}");
            }
        }
    }
    // Half of it alike is not it.
    let alike = format!("{}-other-ending-that-differs", &VALUE[..VALUE.len() / 2]);
    assert_eq!(find_in(&needles, STANDARD.encode(alike).as_bytes()), vec![]);
}

#[test]
fn keys_of_many_lines_are_found_however_they_are_laid_out() {
    let body: String = (0..1200u32).map(|n| char::from(b'A' + (n * n % 26) as u8)).collect();
    let key = format!(
        "-----BEGIN PRIVATE KEY-----\n{}-----END PRIVATE KEY-----\n",
        wrapped(&body, 64, "", "\n")
    );
    let needles = named(&[("KEY", &key)]);
    let other = key.replace('A', "B");
    for (what, text, found) in [
        ("as it is", key.clone(), true),
        ("without its last line's end", key.trim().to_owned(), true),
        ("in YAML", wrapped(&key.replace('\n', "\n    "), 4096, "", ""), true),
        ("in JSON", serde_json::to_string(&key).unwrap(), true),
        ("in base64, wrapped", wrapped(&STANDARD.encode(&key), 76, "", "\n"), true),
        ("another", other, false),
    ] {
        assert_eq!(!find_in(&needles, text.as_bytes()).is_empty(), found, "{what}");
    }
}

#[test]
fn what_is_found_does_not_depend_on_how_bytes_are_cut() {
    let needles = needles();
    let encoded = wrapped(&STANDARD.encode(format!("x{VALUE}")), 76, "  ", "\n");
    let mut text = vec![b'.'; 600 << 10];
    // Around every boundary a buffer may have.
    for place in (0..600 << 10).step_by(32 << 10).skip(1) {
        text[place - 20..place - 20 + VALUE.len()].copy_from_slice(VALUE.as_bytes());
        let at = place + 5000;
        text[at..at + encoded.len()].copy_from_slice(encoded.as_bytes());
    }
    let offsets = |cut: usize| {
        let mut found = Vec::new();
        let mut scan = NeedleScan::new(&needles);
        for part in text.chunks(cut) {
            scan.feed(part, &mut |one| found.push((one.offset(), one.runs().last())));
        }
        scan.finish(&mut |one| found.push((one.offset(), one.runs().last())));
        found.sort_by_key(|(offset, _)| *offset);
        found.dedup();
        found
    };
    let whole = offsets(usize::MAX);
    assert_eq!(whole.len(), 36, "{whole:?}");
    for cut in [1, 7, 4096, 100_000, 262_144, 262_145] {
        assert_eq!(offsets(cut), whole, "cut into {cut}");
    }
}

#[test]
fn short_values_are_looked_for_with_care() {
    let needles = named(&[("PIN", "1234"), ("TINY", "ab"), ("EMPTY", "")]);
    assert_eq!(find_in(&needles, b"pin: 1234").len(), 1);
    assert_eq!(find_in(&needles, b"ab MTIzNA== 31323334").len(), 0);
    assert!(named(&[("TINY", "ab"), ("EMPTY", "")]).is_empty());
}

#[test]
fn a_value_in_another_is_found_in_its_own_name_too() {
    let needles = named(&[("LONG", "prefix-inner-value"), ("INNER", "inner-value")]);
    let found: Vec<String> =
        find_in(&needles, b"prefix-inner-value").into_iter().map(|(name, ..)| name).collect();
    assert_eq!(found, ["LONG", "INNER"]);
}

#[test]
fn inside_every_container_and_nested() {
    let needles = needles();
    let text = format!("config: {OTHER}\n");
    let text = text.as_bytes();
    let tar = tar_of(&[("a.txt", b"nothing"), ("deep/b.txt", text)]);
    let long = format!("{}/name.txt", "d".repeat(150));
    let deflated = zip::CompressionMethod::Deflated;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("gzip", gzip(text), ""),
        ("two gzips in one", [gzip(b"one"), gzip(text)].concat(), ""),
        ("zstd", zstd::encode_all(text, 1).unwrap(), ""),
        ("tar", tar.clone(), "deep/b.txt"),
        ("tar.gz", gzip(&tar), "deep/b.txt"),
        ("tar with long names", gzip(&tar_of(&[(&long, text)])), &long),
        ("zip", zip_of(&[("x/y.env", text)], deflated), "x/y.env"),
        ("zip, stored", zip_of(&[("y", text)], zip::CompressionMethod::Stored), "y"),
        ("zip, streamed", streamed_zip(&[("e", b""), ("a", b"a"), ("b", text)]), "b"),
        (
            "zip in tar.gz",
            gzip(&tar_of(&[("in.zip", &zip_of(&[("m", text)], deflated))])),
            "in.zip!m",
        ),
        ("gzip in zip", zip_of(&[("m.gz", &gzip(text))], deflated), "m.gz"),
    ];
    for (what, bytes, member) in cases {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), &bytes).unwrap();
        let found = search(dir.path(), &needles).finds;
        let inside = found.iter().find(|find| {
            matches!(&find.what, MatchKind::Secret { place: Place::Member, name, within, maskable: false, .. }
                if name == "TOKEN" && within.as_deref() == Some(member.as_bytes()))
        });
        assert!(inside.is_some(), "{what}: {found:?}");
        let unsearched = |find: &Match| matches!(find.what, MatchKind::Unsearched { .. });
        assert!(!found.iter().any(unsearched), "{what}: {found:?}");
    }
}

#[test]
fn what_is_not_looked_into_is_told() {
    let needles = needles();
    let text = OTHER.as_bytes();
    let reason = |bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), bytes).unwrap();
        let found = search(dir.path(), &needles).finds;
        found.into_iter().find_map(|find| match find.what {
            MatchKind::Unsearched { reason, .. } => Some(reason),
            MatchKind::Secret { .. } => None,
        })
    };
    let deep = gzip(&gzip(&gzip(&gzip(text))));
    assert_eq!(reason(&deep).as_deref(), Some("archives in archives, more than 3 deep"));
    let damaged = &gzip(&vec![7; 100_000])[..60];
    assert_eq!(reason(damaged).as_deref(), Some("it is damaged"));
    assert_eq!(reason(b"\xfd7zXZ\0garbage").as_deref(), Some("xz is not looked into"));
    let mut locked = zip_of(&[("a", text)], zip::CompressionMethod::Deflated);
    locked[6] |= 1;
    assert_eq!(reason(&locked).as_deref(), Some("it is encrypted"));
    assert_eq!(reason(&gzip(text)), None);
}

#[test]
fn a_bomb_costs_no_more_than_a_large_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let zeros = vec![0; 1 << 20];
    for _ in 0..80 {
        encoder.write_all(&zeros).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 400 << 10);
    // A tar's name that is as long as the bomb is not kept in memory either.
    let mut header = tar::Header::new_gnu();
    header.set_size(80 << 20);
    header.set_entry_type(tar::EntryType::GNULongName);
    header.set_cksum();
    let mut named = GzEncoder::new(Vec::new(), Compression::best());
    named.write_all(header.as_bytes()).unwrap();
    for _ in 0..80 {
        named.write_all(&zeros).unwrap();
    }
    fs::write(dir.path().join("bomb.gz"), &bomb).unwrap();
    fs::write(dir.path().join("nested.gz"), gzip(&bomb)).unwrap();
    fs::write(dir.path().join("name.tar.gz"), named.finish().unwrap()).unwrap();
    let found = search(dir.path(), &needles()).finds;
    let told: Vec<_> = found
        .iter()
        .map(|find| (String::from_utf8_lossy(&find.path).into_owned(), find.what.clone()))
        .collect();
    assert_eq!(told.len(), 3, "{told:?}");
    for (path, what) in told {
        let MatchKind::Unsearched { reason, .. } = what else { panic!("{path}: {what:?}") };
        assert_eq!(reason, "it unpacks to more than is looked at", "{path}");
    }
}

#[test]
fn names_links_and_attributes_of_a_hostile_tree() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), OTHER).unwrap();
    fs::create_dir_all(root.join(format!("d-{OTHER}/sub"))).unwrap();
    fs::write(root.join(format!("d-{OTHER}/sub/clean")), "nothing").unwrap();
    fs::write(root.join(format!("f-{OTHER}")), "nothing").unwrap();
    fs::write(root.join("marked"), "nothing").unwrap();
    xattr::set(root.join("marked"), "user.note", OTHER.as_bytes()).unwrap();
    xattr::set(root, "user.note", OTHER.as_bytes()).unwrap();
    symlink(format!("/nowhere/{OTHER}"), root.join("says")).unwrap();
    symlink(outside.path(), root.join("out")).unwrap();
    symlink(outside.path().join("secret"), root.join("file-out")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    let fifo = root.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    let found: Vec<_> = search(root, &needles())
        .finds
        .iter()
        .map(|find| (String::from_utf8_lossy(&find.path).into_owned(), secret(find).unwrap().1))
        .collect();
    assert_eq!(
        found,
        [
            (String::new(), Place::Attribute),
            (format!("d-{OTHER}"), Place::Name),
            (format!("f-{OTHER}"), Place::Name),
            ("marked".to_owned(), Place::Attribute),
            ("says".to_owned(), Place::Link),
        ]
    );
    assert_eq!(needles().mask(format!("/a/{OTHER}/b").as_bytes()), b"/a/********************/b");
}

#[test]
fn holes_are_passed_over_and_what_follows_them_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::create(dir.path().join("sparse")).unwrap();
    file.seek(SeekFrom::Start(8 << 30)).unwrap();
    file.write_all(OTHER.as_bytes()).unwrap();
    file.set_len(16 << 30).unwrap();
    drop(file);
    let searched = search(dir.path(), &needles());
    assert!(searched.bytes < 1 << 20, "{} bytes were read", searched.bytes);
    let MatchKind::Secret { offset, .. } = searched.finds[0].what else { panic!("{searched:?}") };
    assert_eq!(offset, Some(8 << 30));
}

#[test]
fn what_was_searched_is_read_again_only_when_it_changed() {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..200 {
        fs::write(dir.path().join(n.to_string()), format!("file {n}")).unwrap();
    }
    fs::write(dir.path().join("found"), OTHER).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let began = Some(Timestamp::now());
    let needles = needles();
    let first =
        search_tree(dir.path(), &needles, Writers::Busy, &SearchedFiles::default(), began).unwrap();
    assert_eq!((first.files, first.finds.len()), (201, 1));
    fs::write(dir.path().join("7"), OTHER).unwrap();
    fs::rename(dir.path().join("8"), dir.path().join(format!("8-{OTHER}"))).unwrap();
    xattr::set(dir.path().join("9"), "user.x", OTHER.as_bytes()).unwrap();
    let second = search_tree(dir.path(), &needles, Writers::None, &first.seen, None).unwrap();
    // What was found is found again, until somebody has done something about it.
    assert_eq!((second.files, second.finds.len()), (4, 4), "{:?}", second.finds);
    // What changed just now may change again in the same tick.
    let now = Some(Timestamp::now());
    fs::write(dir.path().join("10"), "just now").unwrap();
    let third =
        search_tree(dir.path(), &needles, Writers::Busy, &SearchedFiles::default(), now).unwrap();
    assert!(third.seen.0.len() < first.seen.0.len(), "{}", third.seen.0.len());
}

#[tokio::test]
async fn masking_leaves_nothing_and_moves_nothing() {
    let data = tempfile::tempdir().unwrap();
    let ids = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let options = StoreOptions { base_owner: Some(ids), ..StoreOptions::default() };
    let store = Store::open_with(data.path(), options).unwrap();
    let lower = store.begin(&[]).await.unwrap();
    fs::write(store.diff_dir(&lower).join(format!("old-{OTHER}")), "old").unwrap();
    let open = store.begin(std::slice::from_ref(&lower)).await.unwrap();
    let root = store.diff_dir(&open);
    let line = wrapped(&STANDARD.encode(format!("{VALUE}{VALUE}")), 64, "", "\n");
    let text = format!("a={OTHER}\nb={VALUE}\n{OTHER}{OTHER}\n{line}");
    fs::write(root.join("plain"), &text).unwrap();
    fs::create_dir(root.join(format!("dir-{OTHER}"))).unwrap();
    fs::write(root.join(format!("dir-{OTHER}/x-{OTHER}")), OTHER).unwrap();
    fs::write(root.join(format!("old-{OTHER}")), "new").unwrap();
    symlink(format!("to/{OTHER}"), root.join("link")).unwrap();
    xattr::set(root.join("plain"), "user.v", OTHER.as_bytes()).unwrap();
    fs::write(root.join("kept.gz"), gzip(OTHER.as_bytes())).unwrap();
    let needles = std::sync::Arc::new(needles());
    let chain: Vec<LayerId> = vec![lower];
    for _ in 0..2 {
        let found = store
            .search(&open, &needles, Writers::None, Effort::Foreground, SearchedFiles::default())
            .await
            .unwrap();
        store.mask(&open, &chain, &needles, &found.finds).await.unwrap();
    }
    let left = store
        .search(&open, &needles, Writers::None, Effort::Foreground, SearchedFiles::default())
        .await
        .unwrap()
        .finds;
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].path, b"kept.gz", "an archive cannot be masked");
    let masked = fs::read_to_string(root.join("plain")).unwrap();
    assert_eq!(masked.len(), text.len());
    assert!(masked.starts_with("a=********************\nb=****"), "{masked}");
    assert_eq!(fs::read_link(root.join("link")).unwrap(), Path::new("to/********************"));
    let stars = "*".repeat(OTHER.len());
    assert!(root.join(format!("dir-{stars}/x-{stars}")).exists());
    assert_eq!(fs::read(root.join(format!("old-{stars}"))).unwrap(), b"new");
    let hidden = fs::symlink_metadata(root.join(format!("old-{OTHER}"))).unwrap();
    assert!(
        std::os::unix::fs::FileTypeExt::is_char_device(&hidden.file_type()),
        "what lies below does not show again"
    );
    let mut rest = String::new();
    File::open(root.join("plain")).unwrap().read_to_string(&mut rest).unwrap();
    assert!(!rest.contains(&STANDARD.encode(VALUE)[4..20]), "{rest}");
}
