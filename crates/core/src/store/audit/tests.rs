//! What verification finds, and what a crash leaves.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tempfile::TempDir;

use super::segments::{dir_of, list_segments, path_of};
use super::{
    AuditFinding, AuditKey, AuditReport, AuditWriter, audit_chains, read_audit, verify_audit,
};
use crate::model::{AuditChain, AuditFilter, AuditRecord};

const LIMIT: u64 = 1 << 30;

/// A data directory with an audit log.
struct Log {
    data: TempDir,
    chain: AuditChain,
    key: AuditKey,
    limit: u64,
}

impl Log {
    fn new() -> Self {
        Self::limited(LIMIT)
    }

    fn limited(limit: u64) -> Self {
        let data = tempfile::tempdir().unwrap();
        let chain = AuditChain::Project("p".parse().unwrap());
        let (key, aside) = AuditKey::open(data.path()).unwrap();
        assert_eq!(aside, None);
        Self { data, chain, key, limit }
    }

    fn with(entries: usize) -> Self {
        let log = Self::new();
        log.append(entries);
        log
    }

    fn audit(&self) -> PathBuf {
        self.data.path().join("audit")
    }

    fn dir(&self) -> PathBuf {
        dir_of(&self.audit(), &self.chain)
    }

    fn writer(&self) -> AuditWriter {
        AuditWriter::new(self.audit(), self.key.clone(), self.limit)
    }

    /// What a daemon does that begins, appends and ends.
    fn append(&self, entries: usize) {
        let mut writer = self.writer();
        for number in 0..entries {
            writer.append(&self.chain, &[record(number)]).unwrap();
        }
        writer.flush().unwrap();
    }

    fn verify(&self) -> AuditReport {
        verify_audit(&self.audit(), &self.chain, &self.key, None).unwrap()
    }

    fn found(&self) -> Vec<String> {
        self.verify().findings.iter().map(ToString::to_string).collect()
    }

    fn segments(&self) -> Vec<PathBuf> {
        let dir = self.dir();
        list_segments(&dir).unwrap().into_iter().map(|first| path_of(&dir, first)).collect()
    }

    fn newest(&self) -> PathBuf {
        self.segments().pop().unwrap()
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(self.newest()).unwrap().lines().map(str::to_owned).collect()
    }

    fn put_lines(&self, lines: &[String]) {
        fs::write(self.newest(), lines.join("\n") + "\n").unwrap();
    }

    fn actions(&self) -> Vec<String> {
        let filter = AuditFilter::default();
        let page = read_audit(&self.audit(), &self.chain, None, 0, &filter, (usize::MAX, u64::MAX));
        page.unwrap().entries.into_iter().map(|entry| entry.record.action).collect()
    }
}

fn record(number: usize) -> AuditRecord {
    let project = "p".parse().unwrap();
    AuditRecord::by_system(Some(&project), "test.done", Some(format!("thing/{number}")))
        .with("text", "x".repeat(20))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn a_chain_of_several_daemons_is_whole() {
    let log = Log::new();
    let untouched = verify_audit(&log.audit(), &log.chain, &log.key, None).unwrap();
    assert_eq!((untouched.entries, untouched.found), (0, 0));
    for _ in 0..3 {
        log.append(5);
    }
    let report = log.verify();
    assert_eq!((report.entries, report.last, report.signed), (15, 15, 15));
    assert_eq!((report.first, report.unsigned(), report.findings.len()), (1, 0, 0));
    assert_eq!(log.actions(), vec!["test.done"; 15]);
    assert_eq!(audit_chains(&log.audit()).unwrap(), std::slice::from_ref(&log.chain));
    let (again, _) = AuditKey::open(log.data.path()).unwrap();
    let read = verify_audit(&log.audit(), &log.chain, &again, None).unwrap();
    assert_eq!(read, report, "the key is kept");
}

#[test]
fn a_removed_line_is_named() {
    let log = Log::with(10);
    let lines = log.lines();
    let mut without = lines.clone();
    // The header is line 0.
    without.remove(4);
    log.put_lines(&without);
    assert_eq!(log.found(), ["entry 4 is missing"]);
    let mut without = lines.clone();
    without.drain(2..=5);
    log.put_lines(&without);
    assert_eq!(log.found(), ["entries 2 to 5 are missing"]);
    let mut without = lines;
    without.remove(1);
    log.put_lines(&without);
    assert_eq!(log.found(), ["entry 1 is missing"]);
}

#[test]
fn reordered_and_repeated_lines_are_named() {
    let log = Log::with(10);
    let lines = log.lines();
    let mut swapped = lines.clone();
    swapped.swap(4, 5);
    log.put_lines(&swapped);
    assert_eq!(log.found(), ["entry 4 comes after entry 5"]);
    let mut moved = lines.clone();
    let line = moved.remove(3);
    moved.push(line);
    log.put_lines(&moved);
    assert_eq!(log.found(), ["entry 3 comes after entry 10"]);
    let mut repeated = lines;
    repeated.insert(6, repeated[2].clone());
    log.put_lines(&repeated);
    let name = log.newest().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(log.found(), [format!("entry 2 is there again (line 7 of `{name}`)")]);
}

#[test]
fn a_cut_end_is_found() {
    let log = Log::with(10);
    let lines = log.lines();
    log.put_lines(&lines[..8]);
    let cut = "the end was cut off: it goes to entry 7, and was signed up to entry 10";
    assert_eq!(log.found(), [cut]);
    // In the middle of a line.
    let text = fs::read(log.newest()).unwrap();
    fs::write(log.newest(), &text[..text.len() - 20]).unwrap();
    let found = log.found();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[1].contains("it goes to entry 6"), "{found:?}");
    // With the head of an earlier time there is nothing to see: that is what noting heads is for.
    let log = Log::with(5);
    let earlier = fs::read(log.dir().join("head.json")).unwrap();
    let lines = log.lines();
    log.append(5);
    let noted = log.verify();
    fs::write(log.dir().join("head.json"), earlier).unwrap();
    log.put_lines(&lines);
    assert_eq!(log.found(), [""; 0]);
    let verify = |hash: &str| {
        let noted = Some((10, hash));
        verify_audit(&log.audit(), &log.chain, &log.key, noted).unwrap().findings
    };
    assert_eq!(verify(&noted.last_hash), [AuditFinding::NotAsNoted { seq: 10 }]);
}

#[test]
fn a_noted_entry_is_recognised_by_the_beginning_of_its_hash() {
    let log = Log::with(10);
    let hash = log.verify().last_hash;
    log.append(3);
    let verify = |seq, hash: &str| {
        let noted = Some((seq, hash));
        verify_audit(&log.audit(), &log.chain, &log.key, noted).unwrap().findings
    };
    assert_eq!(verify(10, &hash), []);
    assert_eq!(verify(10, &hash[..12]), []);
    assert_eq!(verify(9, &hash), [AuditFinding::NotAsNoted { seq: 9 }]);
    assert_eq!(verify(10, ""), [AuditFinding::NotAsNoted { seq: 10 }]);
}

#[test]
fn an_entry_that_was_made_again_does_not_fit_the_next_one() {
    let log = Log::with(10);
    let lines = log.lines();
    for (seq, by) in [(4, "entry 5"), (10, "the signed head")] {
        let mut forged = lines.clone();
        let (text, _) = forged[seq].split_once(",\"hash\":").unwrap();
        let text = text.replace("thing/", "other/");
        let hash = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&text));
        forged[seq] = format!("{text},\"hash\":\"{hash}\"}}");
        log.put_lines(&forged);
        assert_eq!(log.found(), [format!("entry {seq} is not the one that {by} was made after")]);
    }
}

#[test]
fn a_head_is_bound_to_its_chain_and_its_key() {
    let log = Log::with(5);
    let path = log.dir().join("head.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("\"seq\":5", "\"seq\":4")).unwrap();
    let found = log.found();
    assert!(found.len() == 1 && found[0].contains("its signature is wrong"), "{found:?}");
    fs::write(&path, text.replace("project/p", "project/q")).unwrap();
    assert!(log.found()[0].contains("it is the head of `project/q`"));
    fs::write(&path, "{}").unwrap();
    assert!(log.found()[0].contains("it cannot be read"));
    fs::remove_file(&path).unwrap();
    assert_eq!(log.found(), ["the signed head is missing: the end may be cut off"]);
    fs::write(&path, text).unwrap();
    fs::remove_file(log.data.path().join("audit.key")).unwrap();
    let (other, _) = AuditKey::open(log.data.path()).unwrap();
    let report = verify_audit(&log.audit(), &log.chain, &other, None).unwrap();
    assert_eq!(report.findings, [AuditFinding::HeadOtherKey]);
}

#[test]
fn segments_of_another_chain_do_not_fit() {
    let log = Log::with(5);
    let other = AuditChain::Project("q".parse().unwrap());
    let mut writer = log.writer();
    for number in 0..5 {
        writer.append(&other, &[record(number)]).unwrap();
    }
    writer.flush().unwrap();
    fs::copy(path_of(&dir_of(&log.audit(), &other), 1), log.newest()).unwrap();
    let found = log.found();
    assert!(found.iter().any(|one| one.contains("is of chain `project/q`")), "{found:?}");
}

#[test]
fn old_segments_are_removed_with_an_anchor() {
    let log = Log::limited(64 << 10);
    log.append(1000);
    let size: u64 = log.segments().iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(size <= 80 << 10, "{size}");
    let report = log.verify();
    assert_eq!((report.last, report.signed, report.findings.len()), (1000, 1000, 0), "{report:?}");
    assert!(report.first > 500 && report.entries == 1000 - report.first + 1, "{report:?}");
    log.append(1000);
    assert_eq!(log.found(), [""; 0]);
    let segments = log.segments();
    assert!(segments.len() >= 3, "{segments:?}");
    // One in the middle, then the oldest.
    let aside = log.data.path().join("aside");
    for removed in [1, 0] {
        fs::rename(&segments[removed], &aside).unwrap();
        let found = log.found();
        assert!(found.len() == 1 && found[0].contains("a whole segment"), "{found:?}");
        fs::rename(&aside, &segments[removed]).unwrap();
    }
    // The newest: that is a cut end.
    fs::remove_file(segments.last().unwrap()).unwrap();
    let found = log.found();
    assert!(found.len() == 1 && found[0].starts_with("the end was cut off"), "{found:?}");
}

#[test]
fn a_removal_that_was_interrupted_is_finished() {
    let log = Log::limited(64 << 10);
    log.append(100);
    let before = log.data.path().join("before");
    copy(&log.dir(), &before);
    log.append(300);
    assert_eq!(log.found(), [""; 0]);
    let count = log.segments().len();
    // The head says that it was removed, and it still exists.
    let mut left = 0;
    for path in fs::read_dir(&before).unwrap().flatten().map(|entry| entry.path()) {
        let to = log.dir().join(path.file_name().unwrap());
        if !to.exists() {
            fs::copy(&path, to).unwrap();
            left += 1;
        }
    }
    assert!(left > 0 && log.segments().len() > count);
    assert_eq!(log.found(), [""; 0]);
    log.append(1);
    assert!(log.segments().len() <= count + 1, "{:?}", log.segments());
    assert_eq!(log.found(), [""; 0]);
}

#[test]
fn a_crash_before_the_head_is_not_tampering() {
    let log = Log::with(5);
    let mut writer = log.writer();
    for number in 0..3 {
        writer.append(&log.chain, &[record(number)]).unwrap();
    }
    // The daemon dies: no flush.
    drop(writer);
    let report = log.verify();
    assert_eq!((report.last, report.signed, report.unsigned()), (8, 5, 3));
    assert_eq!(report.findings, []);
    let mut writer = log.writer();
    let resumed = writer.append(&log.chain, &[record(9)]).unwrap().unwrap();
    writer.flush().unwrap();
    assert_eq!((resumed.unsigned, resumed.dropped_bytes, resumed.damage), (3, 0, None));
    let report = log.verify();
    assert_eq!((report.last, report.signed, report.found), (10, 10, 0), "{report:?}");
    assert_eq!(log.actions()[8..], ["audit.resumed", "test.done"]);
    let resumed = writer.append(&log.chain, &[record(10)]).unwrap();
    assert_eq!(resumed, None, "it is told once");
}

#[test]
fn every_unfinished_append_is_removed_and_told() {
    let log = Log::with(5);
    let whole = fs::read(log.newest()).unwrap();
    let mut writer = log.writer();
    writer.append(&log.chain, &[record(6), record(7)]).unwrap();
    drop(writer);
    let longer = fs::read(log.newest()).unwrap();
    let head = fs::read(log.dir().join("head.json")).unwrap();
    for end in (whole.len()..longer.len()).step_by(7) {
        // What was appended exists up to here; or beyond it only its length does, as after a power
        // cut.
        for zeros in [0, longer.len() - end] {
            let mut torn = longer[..end].to_vec();
            torn.resize(end + zeros, 0);
            fs::write(log.newest(), &torn).unwrap();
            let report = log.verify();
            assert_eq!(report.findings, [], "{end} {zeros}");
            let mut writer = log.writer();
            writer.append(&log.chain, &[record(8)]).unwrap();
            writer.flush().unwrap();
            let report = log.verify();
            assert_eq!((report.findings.len(), report.unfinished_bytes), (0, 0), "{end} {zeros}");
            assert_eq!(log.actions().last().unwrap(), "test.done");
            fs::write(log.dir().join("head.json"), &head).unwrap();
        }
    }
}

#[test]
fn a_crash_at_the_beginning_of_a_chain_or_a_segment_begins_again() {
    let log = Log::with(0);
    let mut writer = log.writer();
    writer.append(&log.chain, &[record(1)]).unwrap();
    drop(writer);
    // A chain that has a head and the beginning of a header.
    let text = fs::read(log.newest()).unwrap();
    for end in [0, 1, 30, 100] {
        fs::write(log.newest(), &text[..end]).unwrap();
        assert_eq!(log.found(), [""; 0], "{end}");
        log.append(1);
        assert_eq!(log.found(), [""; 0], "{end}");
        assert_eq!(log.actions(), ["test.done"], "{end}");
        fs::remove_file(log.newest()).unwrap();
        fs::remove_file(log.dir().join("head.json")).unwrap();
        let mut writer = log.writer();
        writer.append(&log.chain, &[record(1)]).unwrap();
    }
    // A second segment of which there is the file only.
    let log = Log::with(5);
    fs::write(path_of(&log.dir(), 6), "").unwrap();
    assert_eq!(log.found(), [""; 0]);
    log.append(2);
    assert_eq!(log.found(), [""; 0]);
    assert_eq!(log.verify().last, 7);
    // A draft of a head.
    fs::write(log.dir().join("head.json.new"), "{\"format\":1,").unwrap();
    log.append(1);
    assert_eq!(log.found(), [""; 0]);
}

#[test]
fn a_chain_that_was_cut_goes_on_and_keeps_telling() {
    let log = Log::with(10);
    let lines = log.lines();
    log.put_lines(&lines[..8]);
    let mut writer = log.writer();
    let resumed = writer.append(&log.chain, &[record(1)]).unwrap().unwrap();
    writer.flush().unwrap();
    let damage = resumed.damage.unwrap();
    assert_eq!(damage, "it goes to entry 7, and was signed up to entry 10");
    let missing = "entries 8 to 10 are missing: the end of a segment, or a whole segment";
    let told = |log: &Log| {
        let found = log.found();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("entry 11: at ") && found[0].ends_with(&damage), "{found:?}");
        assert_eq!(found[1], missing);
    };
    told(&log);
    assert_eq!(log.actions()[7..], ["audit.damaged", "test.done"]);
    log.append(3);
    told(&log);
}

#[test]
fn a_chain_without_its_head_or_its_segments_goes_on() {
    let log = Log::with(10);
    // Its end is unknown; from then on it is reported that the end may be cut off.
    fs::remove_file(log.dir().join("head.json")).unwrap();
    let mut writer = log.writer();
    writer.append(&log.chain, &[record(1)]).unwrap();
    let head = fs::read_to_string(log.dir().join("head.json")).unwrap();
    assert!(head.contains("\"seq\":11,"), "the first head is for `audit.damaged`, too: {head}");
    writer.append(&log.chain, &[record(2)]).unwrap();
    writer.flush().unwrap();
    let found = log.found();
    assert!(found.len() == 1 && found[0].ends_with("its head is missing"), "{found:?}");
    assert_eq!(log.actions()[10..], ["audit.damaged", "test.done", "test.done"]);
    for path in log.segments() {
        fs::remove_file(path).unwrap();
    }
    assert!(log.found()[0].starts_with("the end was cut off"), "{:?}", log.found());
    log.append(1);
    let found = log.found();
    assert!(found.len() == 2 && found[1].starts_with("entries 1 to 13"), "{found:?}");
    assert_eq!(log.actions(), ["audit.damaged", "test.done"]);
}

#[test]
fn a_damaged_key_is_put_aside() {
    let log = Log::with(3);
    fs::write(log.data.path().join("audit.key"), "short").unwrap();
    assert!(AuditKey::read(log.data.path()).is_err());
    let (key, aside) = AuditKey::open(log.data.path()).unwrap();
    assert_eq!(aside.as_deref(), Some("audit.key.damaged"));
    let mut writer = AuditWriter::new(log.audit(), key.clone(), LIMIT);
    let resumed = writer.append(&log.chain, &[record(1)]).unwrap().unwrap();
    writer.flush().unwrap();
    assert_eq!(resumed.damage.as_deref(), Some("its head was signed with another key"));
    let report = verify_audit(&log.audit(), &log.chain, &key, None).unwrap();
    assert_eq!((report.found, report.last), (1, 5), "{report:?}");
}

#[test]
fn a_failed_append_leaves_the_chain_whole() {
    let log = Log::with(3);
    let mut writer = log.writer();
    writer.append(&log.chain, &[record(1)]).unwrap();
    // A directory in the place of the next head: signing fails, appending continues.
    let head = log.dir().join("head.json.new");
    fs::create_dir(&head).unwrap();
    assert!(writer.flush().is_err() && writer.is_dirty());
    writer.append(&log.chain, &[record(2)]).unwrap();
    assert!(writer.flush().is_err());
    fs::remove_dir(&head).unwrap();
    writer.flush().unwrap();
    assert!(!writer.is_dirty());
    let report = log.verify();
    assert_eq!((report.last, report.signed, report.found), (5, 5, 0), "{report:?}");
}

#[test]
fn a_chain_that_cannot_be_synced_holds_up_no_other() {
    let log = Log::new();
    let mut writer = log.writer();
    let chain = |number: usize| AuditChain::Project(format!("p{number}").parse().unwrap());
    let most = super::writer::OPEN;
    for number in 0..most {
        writer.append(&chain(number), &[record(number)]).unwrap();
    }
    // Signing fails for the one that is closed first.
    let head = dir_of(&log.audit(), &chain(0)).join("head.json.new");
    fs::create_dir(&head).unwrap();
    writer.append(&chain(most), &[record(1)]).unwrap();
    writer.append(&chain(most + 1), &[record(1)]).unwrap();
    writer.flush().unwrap();
    fs::remove_dir(&head).unwrap();
    // Nothing of it was lost, and it is found when it is opened again.
    let resumed = writer.append(&chain(0), &[record(2)]).unwrap().unwrap();
    assert_eq!((resumed.unsigned, resumed.damage), (1, None));
    writer.flush().unwrap();
    for (number, last) in [(0, 3), (1, 1), (2, 1), (most, 1)] {
        let report = verify_audit(&log.audit(), &chain(number), &log.key, None).unwrap();
        assert_eq!((report.last, report.signed, report.found), (last, last, 0), "{number}");
    }
    // One whose directory was removed is begun again.
    fs::remove_dir_all(dir_of(&log.audit(), &chain(5))).unwrap();
    writer.append(&chain(5), &[record(2)]).unwrap();
    assert!(writer.flush().is_err());
    writer.append(&chain(5), &[record(3)]).unwrap();
    writer.flush().unwrap();
    assert!(!writer.is_dirty());
}

#[test]
fn entries_are_read_in_pages_from_any_number() {
    let log = Log::limited(256 << 10);
    log.append(1000);
    let audit = log.audit();
    let (mut after, mut position, mut seen) = (0, None, Vec::new());
    loop {
        let filter = AuditFilter::default();
        let page = read_audit(&audit, &log.chain, position, after, &filter, (7, 100_000)).unwrap();
        assert!(page.entries.len() <= 7);
        seen.extend(page.entries.iter().map(|entry| entry.seq));
        after = page.last;
        // With a position and without one.
        position = if seen.len() % 2 == 0 { page.position } else { None };
        if page.complete {
            break;
        }
    }
    let first = log.verify().first;
    assert_eq!(seen, (first..=1000).collect::<Vec<_>>());
    let target = Some("thing/997".to_owned());
    let filter = AuditFilter { target, ..AuditFilter::default() };
    let page = read_audit(&audit, &log.chain, None, 0, &filter, (10, u64::MAX)).unwrap();
    assert_eq!(page.entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [998]);
    let since = AuditFilter { since: Some(crate::model::now()), ..AuditFilter::default() };
    let page = read_audit(&audit, &log.chain, None, 0, &since, (10, u64::MAX)).unwrap();
    assert!(page.complete && page.entries.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Any byte of any signed entry, changed to anything else, is found, and the entry is named.
    #[test]
    fn a_changed_byte_is_found(at in 0usize..4000, to in any::<u8>()) {
        let log = Log::with(10);
        let mut text = fs::read(log.newest()).unwrap();
        let header = text.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        let at = header + at % (text.len() - header);
        prop_assume!(text[at] != to);
        let line = text[..at].iter().filter(|byte| **byte == b'\n').count();
        text[at] = to;
        fs::write(log.newest(), &text).unwrap();
        let report = log.verify();
        prop_assert!(report.found > 0, "byte {at}");
        let named = |finding: &AuditFinding| match finding {
            AuditFinding::Changed { seq, .. } => *seq == line as u64,
            AuditFinding::Unreadable { line: number, .. } => *number == line as u64 + 1,
            // The number of the entry itself was changed.
            AuditFinding::Missing { from, to, .. } => (*from..=*to).contains(&(line as u64)),
            AuditFinding::Cut { .. } => line == 10,
            _ => false,
        };
        prop_assert!(report.findings.iter().any(named), "line {line}: {:?}", report.findings);
    }

    /// Any line of any signed entries, removed or put elsewhere, is found.
    #[test]
    fn a_moved_line_is_found(from in 0usize..10, to in 0usize..10, remove in any::<bool>()) {
        let log = Log::with(10);
        let mut lines = log.lines();
        let line = lines.remove(1 + from);
        if !remove {
            prop_assume!(from != to);
            lines.insert(1 + to, line);
        }
        log.put_lines(&lines);
        prop_assert!(log.verify().found > 0);
    }

    /// A chain that is cut anywhere, and continued by a server, never looks whole.
    #[test]
    fn a_cut_chain_never_looks_whole(cut in 1usize..3000) {
        let log = Log::with(10);
        let text = fs::read(log.newest()).unwrap();
        let cut = 1 + cut % (text.len() - 1);
        fs::write(log.newest(), &text[..text.len() - cut]).unwrap();
        prop_assert!(log.verify().found > 0, "{cut}");
        log.append(2);
        prop_assert!(log.verify().found > 0, "{cut}");
    }
}
