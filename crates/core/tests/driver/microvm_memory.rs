//! RAM that is captured from one process and put under others, by the library that is loaded into hypervisors.
//!
//! The process is no hypervisor: it maps RAM as one does, and nothing more is needed to see whether its pages are kept.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use sandkeep_core::driver::microvm::memory::{PagesWritten, RamMap, capture_pages, map_of};
use sandkeep_core::embedded::RAM_SO;
use sandkeep_core::model::Reserve;
use tempfile::TempDir;

const PAGE: u64 = 4096;
const PAGES: u64 = 600;
/// The descriptor of the first file of pages.
const FIRST_PAGES: i32 = 200;

/// A process that has RAM.
struct Machine {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    at: u64,
    placeholder: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file that a child process is given by its descriptor's number.
fn inherited(path: &Path) -> File {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.expect("a file");
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).expect("a flag");
    file
}

fn command(dir: &Path, files: &mut Vec<File>, map: Option<&[u8]>) -> (Command, PathBuf, PathBuf) {
    let fresh = tempfile::tempdir_in(dir).expect("a directory").keep();
    let (library, placeholder, at) = (dir.join("ram.so"), fresh.join("ram"), fresh.join("at"));
    fs::write(&library, RAM_SO.bytes()).expect("the library");
    fs::write(&placeholder, b"").expect("a placeholder");
    let mut command = Command::new("python3");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/ram.py");
    command.arg(script).arg((PAGES * PAGE).to_string());
    command.env("LD_PRELOAD", library).env("SANDKEEP_RAM", &placeholder);
    let place = inherited(&at);
    command.env("SANDKEEP_RAM_AT", place.as_raw_fd().to_string());
    files.push(place);
    if let Some(map) = map {
        let path = fresh.join("map");
        fs::write(&path, map).expect("a map");
        let file = inherited(&path);
        command.env("SANDKEEP_RAM_MAP", file.as_raw_fd().to_string());
        command.env("SANDKEEP_RAM_PAGES", FIRST_PAGES.to_string());
        files.push(file);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    (command, placeholder, at)
}

/// Opens the page files of a map at descriptors that follow each other, and writes the map for them.
fn opened(map: &RamMap, files: &mut Vec<File>) -> Vec<u8> {
    for (number, path) in map.files.iter().enumerate() {
        let file = File::open(path).expect("a file of pages");
        let target = FIRST_PAGES + i32::try_from(number).expect("a small number");
        let copy = rustix::io::fcntl_dupfd_cloexec(&file, target).expect("a descriptor");
        assert_eq!(copy.as_raw_fd(), target, "the descriptor is free");
        rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).expect("a flag");
        files.push(File::from(copy));
    }
    map.write()
}

impl Machine {
    fn start(dir: &Path, image: &[PathBuf]) -> Self {
        let mut files = Vec::new();
        let map = (!image.is_empty()).then(|| {
            let map = map_of(image).expect("a good image");
            assert_eq!(map.ram, PAGES * PAGE);
            opened(&map, &mut files)
        });
        let (mut command, placeholder, at) = command(dir, &mut files, map.as_deref());
        let mut child = command.spawn().expect("python runs");
        let mut answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        answers.read_line(&mut line).expect("an answer");
        if line != "ready\n" {
            let mut told = String::new();
            let _ = child.stderr.take().expect("a pipe").read_to_string(&mut told);
            panic!("it did not come up: {told}");
        }
        let text = fs::read_to_string(at).expect("where RAM is");
        let at = u64::from_str_radix(&text, 16).expect("an address");
        let orders = child.stdin.take().expect("a pipe");
        Self { child, orders, answers, at, placeholder }
    }

    fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("it listens");
        self.orders.flush().expect("it listens");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    fn write(&mut self, pages: &[(u64, u8)]) {
        for (page, byte) in pages {
            writeln!(self.orders, "write {page} {byte}").expect("it listens");
        }
        assert_eq!(self.ask("done"), "ok");
    }

    /// What each page is filled with.
    fn read(&mut self) -> Vec<u16> {
        self.ask("read").split(' ').map(|number| number.parse().expect("a number")).collect()
    }

    fn capture(&self, image: &[PathBuf], into: &Path) -> PagesWritten {
        fs::create_dir(into).expect("a directory");
        let (pid, ram) = (self.child.id(), PAGES * PAGE);
        let written = capture_pages(pid, self.at, ram, image, into, Reserve { bytes: Some(0) })
            .expect("a capture");
        written.sync().expect("stable storage");
        written
    }
}

fn with_python(test: &str) -> bool {
    let there = Command::new("python3").arg("-c").arg("import mmap").output();
    if there.is_ok_and(|output| output.status.success()) {
        return true;
    }
    sandkeep_testkit::daemon::skipped(test, "there is no python3");
    false
}

fn directory() -> TempDir {
    tempfile::Builder::new().prefix("keep-ram-").tempdir().expect("a directory")
}

#[test]
fn memory_is_carried_over_a_chain_of_captures() {
    if !with_python("memory_is_carried_over_a_chain_of_captures") {
        return;
    }
    let dir = directory();
    let mut model = vec![0u16; PAGES as usize];
    let mut image: Vec<PathBuf> = Vec::new();
    let mut seed = 7u64;
    for round in 0..14u64 {
        let mut machine = Machine::start(dir.path(), &image);
        assert_eq!(machine.read(), model, "round {round}");
        let mut changes = Vec::new();
        for _ in 0..40 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (page, byte) = ((seed >> 33) % PAGES, (seed >> 17) as u8 % 4);
            changes.push((page, byte));
            model[page as usize] = u16::from(byte);
        }
        machine.write(&changes);
        let into = dir.path().join(format!("layer-{round}"));
        let written = machine.capture(&image, &into);
        // The first has nothing below it; then one in eight has it all.
        assert_eq!(written.whole, round == 0 || round == 8, "round {round}");
        assert!(written.pages > 0 && (written.whole || written.pages < 300), "{written:?}");
        assert_eq!(machine.read(), model, "round {round}: reading changes nothing");
        let shared = fs::metadata(&machine.placeholder).expect("the placeholder");
        assert_eq!(shared.blocks(), 0, "nothing went into the shared file");
        image.insert(0, into);
    }
    let mut last = Machine::start(dir.path(), &image);
    assert_eq!(last.read(), model);
    assert!(map_of(&image).expect("a map").files.len() <= 8);
}

#[test]
fn machines_of_one_image_do_not_see_each_other() {
    if !with_python("machines_of_one_image_do_not_see_each_other") {
        return;
    }
    let dir = directory();
    let mut first = Machine::start(dir.path(), &[]);
    first.write(&[(1, 1), (2, 2), (599, 9)]);
    let image = vec![dir.path().join("one")];
    let _ = first.capture(&[], &image[0]);
    let mut forks = [Machine::start(dir.path(), &image), Machine::start(dir.path(), &image)];
    forks[0].write(&[(1, 0), (2, 7), (300, 3)]);
    let two = dir.path().join("two");
    let _ = forks[0].capture(&image, &two);
    let seen = forks[1].read();
    assert_eq!((seen[1], seen[2], seen[300], seen[599]), (1, 2, 0, 9));
    let seen = Machine::start(dir.path(), &[two.clone(), image[0].clone()]).read();
    assert_eq!((seen[1], seen[2], seen[300], seen[599]), (0, 7, 3, 9));
    // What was only read, or written and put back, is not kept again.
    forks[1].write(&[(2, 5), (2, 2)]);
    let three = dir.path().join("three");
    assert_eq!(forks[1].capture(&image, &three).pages, 0);
    let seen = Machine::start(dir.path(), &[three, image[0].clone()]).read();
    assert_eq!((seen[1], seen[2], seen[599]), (1, 2, 9));
}

#[test]
fn a_map_that_cannot_be_applied_ends_the_machine() {
    if !with_python("a_map_that_cannot_be_applied_ends_the_machine") {
        return;
    }
    let dir = directory();
    let mut first = Machine::start(dir.path(), &[]);
    first.write(&[(1, 1), (50, 2)]);
    let layer = dir.path().join("layer");
    let _ = first.capture(&[], &layer);
    let map = map_of(std::slice::from_ref(&layer)).expect("a map");
    let mut files = Vec::new();
    let good = opened(&map, &mut files);
    let with = |at: usize, word: u64| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        bytes
    };
    for (name, map, told) in [
        ("magic", with(0, 1), "cannot be read"),
        ("empty", Vec::new(), "cannot be read"),
        ("ram", with(8, PAGES * PAGE + PAGE), "another amount"),
        ("count", with(16, 3), "cut short"),
        ("many", with(16, u64::MAX / 8), "cut short"),
        ("odd", with(24, 1), "is wrong"),
        ("far", with(24, PAGES * PAGE), "is wrong"),
        ("overlap", with(24 + 32, PAGE), "is wrong"),
        ("closed", with(24 + 16, 9999), "not open"),
        ("short", with(24 + 24, 1 << 30), "too short"),
    ] {
        let (mut command, _, at) = command(dir.path(), &mut files, Some(&map));
        let output = command.stdin(Stdio::null()).output().expect("python runs");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(6), "{name}: {errors}");
        assert!(errors.contains("ram.so: ") && errors.contains(told), "{name}: {errors}");
        assert_eq!(fs::read(at).expect("where RAM is"), b"", "{name}: nobody was told");
    }
    let pages = File::options().write(true).open(layer.join("pages")).expect("the pages");
    pages.set_len(PAGE).expect("a shorter file");
    assert!(map_of(std::slice::from_ref(&layer)).is_err(), "a short file is seen before");
    let index = File::options().write(true).open(layer.join("index")).expect("the index");
    index.write_all_at(b"x", 0).expect("a broken index");
    assert!(map_of(&[layer]).is_err(), "so is a broken index");
}
