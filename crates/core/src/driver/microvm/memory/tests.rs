use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::capture::{PagesWritten, capture_within};
use super::map::overlay;
use super::{DEEPEST, RamMap, capture_pages, map_of, merge_pages};
use crate::model::{PAGE, PageIndex, PageRun, Reserve};

/// Captures may fill the disk.
const NONE: Reserve = Reserve { bytes: Some(0) };

const SIZE: usize = PAGE as usize;
const PAGES: usize = 700;

/// Memory of this very process, which is captured as if it were a machine's.
struct Ram {
    room: Vec<u8>,
    start: usize,
}

impl Ram {
    fn new() -> Self {
        let room = vec![0u8; (PAGES + 1) * SIZE];
        let start = room.as_ptr().align_offset(SIZE);
        Self { room, start }
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + PAGES * SIZE]
    }

    /// Fills a page with something; 0 with zeros.
    fn write(&mut self, page: usize, what: u8) {
        let start = self.start + page * SIZE;
        for (place, byte) in self.room[start..start + SIZE].iter_mut().enumerate() {
            *byte = what.wrapping_mul(place as u8 | 1);
        }
    }

    fn capture(&self, most: usize, image: &[PathBuf], into: &Path) -> PagesWritten {
        fs::create_dir(into).expect("a directory");
        let at = self.bytes().as_ptr() as u64;
        capture_within(most, std::process::id(), at, (PAGES * SIZE) as u64, image, into, NONE)
            .expect("a capture")
    }
}

/// What a machine would find in RAM.
fn resolved(map: &RamMap) -> Vec<u8> {
    let mut ram = vec![0; usize::try_from(map.ram).expect("small")];
    let mut last = 0;
    for entry in &map.entries {
        assert!(entry.offset >= last && entry.length > 0, "{entry:?} after {last}");
        last = entry.offset + entry.length;
        let place = entry.offset as usize..last as usize;
        let file = fs::File::open(&map.files[entry.file]).expect("a file of pages");
        file.read_exact_at(&mut ram[place], entry.at).expect("pages");
    }
    ram
}

/// Whether two are the same, without printing them if they are not.
fn same(found: &[u8], expected: &[u8]) -> Result<(), TestCaseError> {
    let differs = |page: &usize| {
        found[page * SIZE..(page + 1) * SIZE] != expected[page * SIZE..(page + 1) * SIZE]
    };
    let wrong: Vec<usize> = (0..PAGES).filter(differs).collect();
    prop_assert!(found.len() == expected.len() && wrong.is_empty(), "pages {wrong:?}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is written between captures, the chain put together is what was in RAM, in few enough pieces.
    #[test]
    fn chains_are_what_was_captured(
        rounds in prop::collection::vec(
            prop::collection::vec((0..PAGES, 1..40usize, 0..4u8), 0..30),
            1..DEEPEST + 4,
        ),
        most in prop::sample::select(vec![1usize, 5, 20, 20_000]),
        cuts in prop::collection::vec(0..8u8, 1..6),
    ) {
        let dir = tempfile::Builder::new().prefix("keep-pages-").tempdir().expect("a directory");
        let mut ram = Ram::new();
        let mut image: Vec<PathBuf> = Vec::new();
        for (round, writes) in rounds.iter().enumerate() {
            for (first, count, what) in writes {
                for page in *first..(first + count).min(PAGES) {
                    ram.write(page, *what);
                }
            }
            let into = dir.path().join(round.to_string());
            let written = ram.capture(most, &image, &into);
            image.insert(0, into);
            let map = map_of(&image).expect("a map");
            prop_assert!(map.entries.len() <= most, "{} pieces of {most}", map.entries.len());
            prop_assert!(map.files.len() <= DEEPEST);
            prop_assert!(round > 0 || written.whole);
            same(&resolved(&map), ram.bytes())?;
            let run = usize::from(cuts[round % cuts.len()]) % image.len();
            let merged = dir.path().join(format!("{round}-merged"));
            fs::create_dir(&merged).expect("a directory");
            merge_pages(&image[..=run], &merged).expect("merged");
            let shorter: Vec<PathBuf> =
                std::iter::once(merged).chain(image[run + 1..].iter().cloned()).collect();
            let map = map_of(&shorter).expect("a map");
            prop_assert!(map.entries.len() <= most, "{} pieces of {most}", map.entries.len());
            same(&resolved(&map), ram.bytes())?;
            if run % 2 == 1 {
                image = shorter;
            }
        }
    }

    /// Laying runs over others is what writing to an array is.
    #[test]
    fn overlays_are_like_arrays(
        layers in prop::collection::vec(
            prop::collection::vec((0..6u64, 1..9u64, any::<bool>()), 0..20),
            1..6,
        ),
    ) {
        let mut model = vec![None; 400];
        let mut extents = Vec::new();
        for (file, gaps) in layers.iter().enumerate() {
            let (mut runs, mut first, mut at) = (Vec::new(), 0, 0);
            for (gap, count, zero) in gaps {
                first += gap;
                runs.push(PageRun { first, count: *count, at: (!zero).then_some(at) });
                for page in 0..*count {
                    let place = (!zero).then_some((file, at + page * PAGE));
                    model[(first + page) as usize] = place;
                }
                first += count;
                at += count * PAGE;
            }
            extents = overlay(&extents, file, &runs);
            let mut found = vec![None; 400];
            let mut last = 0;
            for extent in &extents {
                prop_assert!(extent.first >= last && extent.count > 0);
                last = extent.end();
                for page in 0..extent.count {
                    found[(extent.first + page) as usize] = Some((extent.file, extent.at + page * PAGE));
                }
            }
            prop_assert_eq!(&found, &model);
        }
    }
}

#[test]
fn pages_that_hold_what_they_held_are_not_written_again() {
    let dir = tempfile::Builder::new().prefix("keep-pages-").tempdir().expect("a directory");
    let mut ram = Ram::new();
    (10..200).for_each(|page| ram.write(page, 1));
    let first = dir.path().join("first");
    let written = ram.capture(20_000, &[], &first);
    assert_eq!((written.pages, written.runs, written.whole), (190, 1, true));
    written.sync().expect("stable storage");
    (10..200).for_each(|page| ram.write(page, 2));
    (10..200).for_each(|page| ram.write(page, 1));
    ram.write(50, 3);
    ram.write(53, 3);
    ram.write(100, 0);
    let second = dir.path().join("second");
    let written = ram.capture(20_000, std::slice::from_ref(&first), &second);
    // Two pages, and the two between them so that they are one run; and one that is zero now.
    assert_eq!((written.pages, written.runs, written.whole), (4, 2, false));
    let index = PageIndex::parse(&fs::read(second.join("index")).expect("an index"));
    let runs = index.expect("a good index").runs;
    assert_eq!(runs[0], PageRun { first: 50, count: 4, at: Some(0) });
    assert_eq!(runs[1], PageRun { first: 100, count: 1, at: None });
}

#[test]
fn what_cannot_be_captured_or_mapped_says_why() {
    let dir = tempfile::Builder::new().prefix("keep-pages-").tempdir().expect("a directory");
    let mut ram = Ram::new();
    ram.write(3, 1);
    let first = dir.path().join("first");
    let _ = ram.capture(20_000, &[], &first);
    let (pid, at) = (std::process::id(), ram.bytes().as_ptr() as u64);
    let fresh = |name: &str| {
        let path = dir.path().join(name);
        fs::create_dir(&path).expect("a directory");
        path
    };
    let image = [first.clone()];
    let other = capture_pages(pid, at, PAGE, &image, &fresh("a"), NONE).expect_err("another size");
    assert!(other.to_string().contains("another amount of RAM"), "{other}");
    let odd = capture_pages(pid, at + 1, PAGE, &[], &fresh("b"), NONE);
    assert!(odd.is_err());
    // Nothing is mapped at the beginning of a process.
    let nothing = capture_pages(pid, 0, PAGE, &[], &fresh("c"), NONE).expect_err("no RAM");
    assert!(nothing.to_string().contains("no RAM"), "{nothing}");
    let _ = capture_pages(pid, at, PAGE, &[], &dir.path().join("c"), NONE).expect("a capture");
    assert!(
        capture_pages(u32::MAX >> 1, at, PAGE, &[], &fresh("d"), NONE).is_err(),
        "no such process"
    );
    let again = capture_pages(pid, at, PAGE, &[], &dir.path().join("c"), NONE);
    assert!(again.is_err(), "nothing is overwritten");
    assert!(map_of(&[]).is_err());
    let missing = map_of(&[dir.path().join("nowhere")]).expect_err("nothing is there");
    assert!(missing.to_string().contains("nowhere/index"), "{missing}");
    fs::write(first.join("pages"), b"short").expect("damage");
    let short = map_of(&image).expect_err("too short");
    assert!(short.to_string().contains("shorter than its index"), "{short}");
}
