//! Lines of a Dockerfile: directives, comments, continuations, heredocs.

use super::DockerfileError;

/// One instruction, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogicalLine {
    /// The line it begins in.
    pub(super) line: usize,
    /// Its text, continuations joined.
    pub(super) text: String,
    pub(super) heredocs: Vec<Heredoc>,
}

/// A text that follows an instruction, up to a line with its name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Heredoc {
    /// The name that ends it.
    pub name: String,
    /// The word that announced it, as it is written.
    pub word: String,
    /// Whether variables in it are expanded: the name was not quoted.
    pub expand: bool,
    /// The text, each line with its end.
    pub content: String,
}

/// Reads all lines. The answer begins with the escape character.
pub(super) fn read(text: &str) -> Result<(char, Vec<LogicalLine>), DockerfileError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line)).peekable();
    let mut escape = '\\';
    while let Some((line, text)) = numbered.peek().copied() {
        let Some((key, value)) = directive(text) else { break };
        if key.eq_ignore_ascii_case("escape") {
            escape = match value {
                "\\" => '\\',
                "`" => '`',
                _ => {
                    let reason = "the directive `escape` must be `\\` or a backtick";
                    return Err(DockerfileError::at(line, reason));
                }
            };
        }
        numbered.next();
    }
    let mut all = Vec::new();
    while let Some((line, first)) = numbered.next() {
        if is_comment(first) || first.trim().is_empty() {
            continue;
        }
        let mut whole = String::new();
        let mut next = Some(first.trim_start());
        while let Some(part) = next {
            let Some(continued) = continued(part, escape) else {
                whole.push_str(part);
                break;
            };
            whole.push_str(continued);
            // Comments and empty lines in between belong to nothing.
            next = numbered
                .find(|(_, text)| !is_comment(text) && !text.trim().is_empty())
                .map(|(_, text)| text);
        }
        let whole = whole.trim_end().to_owned();
        let mut heredocs = Vec::new();
        for mut heredoc in announced(&whole, escape) {
            let strip = heredoc.word.contains("<<-");
            loop {
                let Some((_, text)) = numbered.next() else {
                    let reason = format!("the heredoc `{}` has no end", heredoc.name);
                    return Err(DockerfileError::at(line, reason));
                };
                let text = if strip { text.trim_start_matches('\t') } else { text };
                if text == heredoc.name {
                    break;
                }
                heredoc.content.push_str(text);
                heredoc.content.push('\n');
            }
            heredocs.push(heredoc);
        }
        all.push(LogicalLine { line, text: whole, heredocs });
    }
    Ok((escape, all))
}

/// `# key=value`, which counts at the very top only.
fn directive(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.trim().strip_prefix('#')?.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric());
    (plain && !value.is_empty()).then_some((key, value))
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with('#')
}

/// The line without the character that continues it in the next one.
fn continued(line: &str, escape: char) -> Option<&str> {
    let rest = line.trim_end().strip_suffix(escape)?;
    (!rest.ends_with(escape)).then_some(rest)
}

/// The heredocs that an instruction announces, still without their texts.
fn announced(text: &str, escape: char) -> Vec<Heredoc> {
    let (instruction, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    if !["RUN", "COPY", "ADD"].iter().any(|known| known.eq_ignore_ascii_case(instruction)) {
        return Vec::new();
    }
    let found = words(rest, escape).into_iter().filter_map(|word| {
        let after = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
        let quoted = after.strip_prefix('-').unwrap_or(after);
        let name: String = quoted.chars().filter(|c| !matches!(c, '"' | '\'')).collect();
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if name.is_empty() || !name.chars().all(plain) {
            return None;
        }
        let expand = name == quoted;
        Some(Heredoc { name, word: word.clone(), expand, content: String::new() })
    });
    found.collect()
}

/// Splits at white space that is neither quoted nor escaped. Quotes and escapes stay.
pub(super) fn words(text: &str, escape: char) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == escape && quote != Some('\'') {
            word.push(c);
            word.extend(chars.next());
            continue;
        }
        match quote {
            Some(open) if c == open => quote = None,
            None if matches!(c, '"' | '\'') => quote = Some(c),
            None if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            _ => {}
        }
        word.push(c);
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}
