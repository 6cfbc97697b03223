//! Variables and quotes in the words of an instruction.

use std::iter::Peekable;
use std::str::Chars;

/// The most that a word may become.
pub const EXPANDED: usize = 128 << 10;
/// How deep `${a:-${b:-…}}` may go.
const DEEPEST: usize = 20;

/// What a word stands for: quotes and escapes removed, variables replaced. `lookup` knows the
/// variables; one that it does not know is empty.
///
/// # Errors
///
/// Returns what is wrong with the word.
pub fn expand(
    word: &str,
    escape: char,
    quotes: bool,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut expander = Expander { chars: word.chars().peekable(), escape, quotes, lookup };
    expander.until(None, 0)
}

struct Expander<'a> {
    chars: Peekable<Chars<'a>>,
    escape: char,
    /// Whether quotes quote. In a heredoc they are text.
    quotes: bool,
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Expander<'_> {
    /// Expands up to `end`, which is taken, or to the end of the word.
    fn until(&mut self, end: Option<char>, depth: usize) -> Result<String, String> {
        let mut out = String::new();
        while let Some(c) = self.chars.next() {
            match c {
                _ if Some(c) == end => return Ok(out),
                '\'' if self.quotes => self.single_quoted(&mut out)?,
                '"' if self.quotes => self.double_quoted(&mut out, depth)?,
                '$' => out.push_str(&self.variable(depth)?),
                _ if c == self.escape => match self.chars.next() {
                    // In a text, only what would begin a variable needs it.
                    Some(next) if !self.quotes && !matches!(next, '$') && next != self.escape => {
                        out.extend([c, next]);
                    }
                    Some(next) => out.push(next),
                    None => out.push(c),
                },
                _ => out.push(c),
            }
            if out.len() > EXPANDED {
                return Err(format!("it expands to more than {} KiB", EXPANDED >> 10));
            }
        }
        match end {
            None => Ok(out),
            Some(_) => Err("`${` has no `}`".to_owned()),
        }
    }

    fn single_quoted(&mut self, out: &mut String) -> Result<(), String> {
        for c in self.chars.by_ref() {
            if c == '\'' {
                return Ok(());
            }
            out.push(c);
        }
        Err("a single quote is not closed".to_owned())
    }

    fn double_quoted(&mut self, out: &mut String, depth: usize) -> Result<(), String> {
        while let Some(c) = self.chars.next() {
            match c {
                '"' => return Ok(()),
                '$' => out.push_str(&self.variable(depth)?),
                _ if c == self.escape => match self.chars.next() {
                    Some(next) if matches!(next, '"' | '$') || next == self.escape => {
                        out.push(next);
                    }
                    Some(next) => out.extend([c, next]),
                    None => break,
                },
                _ => out.push(c),
            }
            if out.len() > EXPANDED {
                break;
            }
        }
        Err("a double quote is not closed".to_owned())
    }

    /// What follows a `$`.
    fn variable(&mut self, depth: usize) -> Result<String, String> {
        if depth > DEEPEST {
            return Err(format!("variables are nested deeper than {DEEPEST}"));
        }
        if self.chars.peek() != Some(&'{') {
            let name = self.name();
            // A `$` before anything else is only a `$`.
            return Ok(if name.is_empty() {
                "$".to_owned()
            } else {
                (self.lookup)(&name).unwrap_or_default()
            });
        }
        self.chars.next();
        let name = self.name();
        if name.is_empty() {
            return Err("`${` is not followed by the name of a variable".to_owned());
        }
        let value = (self.lookup)(&name);
        let next = self.chars.next();
        let (colon, sign) = match next {
            Some(':') => (true, self.chars.next()),
            other => (false, other),
        };
        // With a colon, an empty variable counts as unset.
        let set = value.clone().filter(|value| !colon || !value.is_empty());
        match sign {
            Some('}') if !colon => Ok(value.unwrap_or_default()),
            Some('-') => {
                let other = self.until(Some('}'), depth + 1)?;
                Ok(set.unwrap_or(other))
            }
            Some('+') => {
                let other = self.until(Some('}'), depth + 1)?;
                Ok(set.map(|_| other).unwrap_or_default())
            }
            Some('?') => {
                let message = self.until(Some('}'), depth + 1)?;
                set.ok_or_else(|| match message.is_empty() {
                    true => format!("the variable `{name}` is not set"),
                    false => format!("the variable `{name}` is not set: {message}"),
                })
            }
            None => Err("`${` has no `}`".to_owned()),
            Some(sign) => Err(format!(
                "`${{{name}{}{sign}…}}` is not supported; there are `:-`, `:+` and `:?`",
                if colon { ":" } else { "" }
            )),
        }
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.chars.peek() {
            let fits =
                c.is_ascii_alphabetic() || *c == '_' || (!name.is_empty() && c.is_ascii_digit());
            if !fits {
                break;
            }
            name.push(*c);
            self.chars.next();
        }
        name
    }
}
