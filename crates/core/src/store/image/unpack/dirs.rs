//! Directories that were described, whose times are set when nothing is made in them any more.
//!
//! An archive can nest ten thousand directories, and the path of each holds the names of all above it: kept whole they take
//! memory with the square of the depth. So of each path only what differs from the one before is kept. Archives list a
//! directory's contents after it, so that is its name. An archive in any other order can make it more, up to a bound.

use std::io;

use super::super::attributes::Attributes;
use super::tree::common;

/// How many bytes of names are kept: of a million directories whose names have 32, listed in any order that keeps the contents of
/// a directory together.
const MOST: usize = 32 << 20;

/// The directories.
#[derive(Debug, Default)]
pub(super) struct Dirs {
    list: Vec<One>,
    /// The path of the newest.
    last: Vec<u8>,
    held: usize,
}

#[derive(Debug)]
struct One {
    /// How much of the path before it is the beginning of this one.
    same: usize,
    rest: Box<[u8]>,
    attributes: Attributes,
}

impl Dirs {
    /// Begins with the top.
    pub(super) fn new(top: Attributes) -> Self {
        let one = One { same: 0, rest: Box::default(), attributes: top };
        Self { list: vec![one], ..Self::default() }
    }

    pub(super) fn push(&mut self, path: &[u8], attributes: Attributes) -> Result<(), &'static str> {
        let same = common(&self.last, path);
        self.held += path.len() - same;
        if self.held > MOST {
            return Err("the names of its directories take too much memory");
        }
        self.list.push(One { same, rest: path[same..].into(), attributes });
        self.last.truncate(same);
        self.last.extend_from_slice(&path[same..]);
        Ok(())
    }

    /// Calls `work` for each, in the order they came.
    pub(super) fn each(
        self,
        mut work: impl FnMut(&[u8], Attributes) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut path = Vec::new();
        for one in self.list {
            path.truncate(one.same);
            path.extend_from_slice(&one.rest);
            work(&path, one.attributes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::attributes::Attributes;
    use super::Dirs;

    #[test]
    fn every_path_comes_back_and_takes_what_is_new_in_it() {
        let all = ["", "a", "a/b", "a/b/c", "a/bc", "a/b", "x/y/z", "", "xy", "x"];
        let mut dirs = Dirs::new(Attributes::DIRECTORY);
        for path in &all[1..] {
            dirs.push(path.as_bytes(), Attributes::DIRECTORY).expect("room");
        }
        assert!(dirs.held < 20, "{}", dirs.held);
        let mut told = Vec::new();
        dirs.each(|path, _| {
            told.push(String::from_utf8_lossy(path).into_owned());
            Ok(())
        })
        .expect("nothing fails");
        assert_eq!(told, all);
    }
}
