//! `.dockerignore`: which files are no part of a build context.

use super::pattern::FilePattern;

/// The patterns of a `.dockerignore` file. The last one that matches a path, or a directory above
/// it, decides; one that begins with `!` brings back.
#[derive(Debug, Clone, Default)]
pub struct IgnoreFile {
    rules: Vec<IgnoreRule>,
}

#[derive(Debug, Clone)]
struct IgnoreRule {
    pattern: FilePattern,
    brings_back: bool,
}

impl IgnoreFile {
    /// Reads the file.
    ///
    /// # Errors
    ///
    /// Returns the line of the first pattern that is none, and what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut rules = Vec::new();
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (at, line) in text.lines().enumerate() {
            if line.starts_with('#') {
                continue;
            }
            let line = line.trim();
            let (brings_back, pattern) = match line.strip_prefix('!') {
                Some(rest) => (true, rest.trim()),
                None => (false, line),
            };
            // As a path: empty and `.` parts say nothing, `..` ends at the top.
            let mut parts: Vec<&str> = Vec::new();
            for part in pattern.split('/').filter(|part| !matches!(*part, "" | ".")) {
                match part {
                    ".." => drop(parts.pop()),
                    _ => parts.push(part),
                }
            }
            if parts.is_empty() {
                continue;
            }
            let pattern =
                FilePattern::parse(&parts.join("/")).map_err(|reason| (at + 1, reason))?;
            rules.push(IgnoreRule { pattern, brings_back });
        }
        Ok(Self { rules })
    }

    /// Whether a path, relative to the context, is ignored. `above` is what was said of the
    /// directory it is in.
    #[must_use]
    pub fn judge(&self, path: &[u8], above: &IgnoreVerdict) -> IgnoreVerdict {
        let mut ignored = false;
        let mut matched = Vec::with_capacity(self.rules.len());
        for (at, rule) in self.rules.iter().enumerate() {
            // What matches a directory matches all that is in it.
            let fits =
                above.matched.get(at).copied().unwrap_or(false) || rule.pattern.matches(path);
            matched.push(fits);
            if fits {
                ignored = !rule.brings_back;
            }
        }
        IgnoreVerdict { ignored, matched }
    }

    /// Whether something in an ignored directory may be brought back, so that it must be looked at.
    #[must_use]
    pub fn brings_back(&self) -> bool {
        self.rules.iter().any(|rule| rule.brings_back)
    }
}

/// What is said of one path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IgnoreVerdict {
    /// Whether it is ignored.
    pub ignored: bool,
    matched: Vec<bool>,
}
