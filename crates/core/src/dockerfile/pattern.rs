//! Patterns for names of files, as Docker reads them.

use globset::{GlobBuilder, GlobMatcher};

/// A pattern: `*` and `?` stop at slashes, `**` does not, `[a-z]` is one of several characters.
#[derive(Debug, Clone)]
pub struct FilePattern(GlobMatcher);

impl FilePattern {
    /// Reads a pattern.
    ///
    /// # Errors
    ///
    /// Returns what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        // Braces are ordinary characters here, and alternatives for the library.
        let mut plain = String::with_capacity(text.len());
        let mut chars = text.chars();
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' => plain.extend(['[', c, ']']),
                '\\' => {
                    plain.push(c);
                    plain.extend(chars.next());
                }
                _ => plain.push(c),
            }
        }
        let built = GlobBuilder::new(&plain).literal_separator(true).backslash_escape(true).build();
        match built {
            Ok(glob) => Ok(Self(glob.compile_matcher())),
            Err(error) => Err(format!("`{text}` is not a pattern: {}", error.kind())),
        }
    }

    /// Whether text has characters that make it a pattern.
    #[must_use]
    pub fn is_pattern(text: &str) -> bool {
        text.contains(['*', '?', '['])
    }

    /// Whether a name or path matches.
    #[must_use]
    pub fn matches(&self, text: &[u8]) -> bool {
        use std::os::unix::ffi::OsStrExt as _;
        self.0.is_match(std::path::Path::new(std::ffi::OsStr::from_bytes(text)))
    }
}
