//! Standard output for people and for programs: colours, width, tables, JSON.

use std::io;
use std::io::{IsTerminal as _, Write as _};

use serde::Serialize;

use crate::failure::{Failure, output_error};

/// Where answers go, and how they are printed there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    /// Whether answers are JSON.
    pub(crate) json: bool,
    /// Colours for standard output.
    pub(crate) paint: Paint,
    /// How many columns there are; none without a terminal.
    width: Option<usize>,
}

impl Screen {
    pub(crate) fn new(json: bool) -> Self {
        let out = io::stdout();
        let width = rustix::termios::tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col));
        Self { json, paint: Paint::of(out.is_terminal()), width: width.filter(|width| *width > 0) }
    }

    /// Writes `value` as JSON, or what `human` says about it.
    pub(crate) fn answer<T: Serialize>(
        &self,
        value: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if self.json {
            return self.json(value);
        }
        self.text(&human(value))
    }

    pub(crate) fn json<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        let mut text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::caused("cannot write the response as JSON", error))?;
        text.push('\n');
        self.text(&text)
    }

    /// Writes one document on one line, for answers that are streams.
    pub(crate) fn json_line<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        let mut text = serde_json::to_string(value)
            .map_err(|error| Failure::caused("cannot write the response as JSON", error))?;
        text.push('\n');
        self.text(&text)
    }

    pub(crate) fn text(&self, text: &str) -> Result<(), Failure> {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn bytes(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(output_error)
    }

    pub(crate) fn table(&self, table: &Table) -> String {
        table.laid_out(self.width, self.paint)
    }
}

/// Writes a line for people on standard error.
pub(crate) fn note(text: &str) {
    // Nothing can be done if standard error is gone.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Colours, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paint {
    on: bool,
}

impl Paint {
    /// Colours on a terminal, unless the user wants none.
    pub(crate) fn of(terminal: bool) -> Self {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { on: terminal && !unwanted && !dumb }
    }

    pub(crate) fn for_errors() -> Self {
        Self::of(io::stderr().is_terminal())
    }

    #[cfg(test)]
    pub(crate) fn plain() -> Self {
        Self { on: false }
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.with("31;1", text)
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    pub(crate) fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    pub(crate) fn cyan(self, text: &str) -> String {
        self.with("36", text)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        match self.on {
            true => format!("\x1b[{code}m{text}\x1b[0m"),
            false => text.to_owned(),
        }
    }
}

/// Rows under a header. Columns are as wide as what is in them. When the terminal is narrower, columns of text give way,
/// the widest first, and what does not fit ends in `…`. Numbers and times are never cut: a number without its unit misleads.
/// Columns that do not fit at all are left out, from the right end; those of [`STAYS`] last. The first column is what other
/// commands want to be told: it is never cut. Without a terminal nothing is cut or left out.
#[derive(Debug)]
pub(crate) struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    state_column: Option<usize>,
}

/// No column is cut to less than this.
const NARROWEST: usize = 6;
const GAP: usize = 2;

/// Columns by which people recognize a row.
const STAYS: [&str; 2] = ["LABEL", "CREATED"];

/// Columns of times.
const TIMES: [&str; 11] = [
    "ASKED", "CREATED", "DELETED", "EXPIRES", "LAST", "QUEUED", "SET", "SINCE", "STARTED", "TIME",
    "USED",
];

impl Table {
    /// A column whose name begins with `>` has numbers and is aligned to the right.
    pub(crate) fn new(header: &[&'static str]) -> Self {
        let state_column = header.iter().position(|name| *name == "STATE");
        Self { header: header.to_vec(), rows: Vec::new(), state_column }
    }

    pub(crate) fn row(&mut self, cells: impl Into<Vec<String>>) {
        let cells: Vec<String> = cells.into();
        debug_assert_eq!(cells.len(), self.header.len());
        // A line break or escape sequence in a name must not break the table.
        let clean = |cell: String| cell.replace(char::is_control, " ");
        self.rows.push(cells.into_iter().map(clean).collect());
    }

    pub(crate) fn laid_out(&self, width: Option<usize>, paint: Paint) -> String {
        let widths = self.widths(width);
        let names: Vec<String> =
            self.header.iter().map(|name| name.trim_start_matches('>').to_owned()).collect();
        let mut text = paint.bold(&self.line(&names, &widths, None));
        text.push('\n');
        for row in &self.rows {
            text.push_str(&self.line(row, &widths, Some(paint)));
            text.push('\n');
        }
        text
    }

    /// Whether a column is shown as it is or not at all.
    fn is_whole(&self, column: usize) -> bool {
        let name = self.header[column];
        column == 0 || name.starts_with('>') || TIMES.contains(&name)
    }

    /// The columns that are shown, with their widths.
    fn widths(&self, available: Option<usize>) -> Vec<(usize, usize)> {
        let longest = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0).max(self.header[column].trim_start_matches('>').len())
        };
        let mut shown: Vec<(usize, usize)> =
            (0..self.header.len()).map(|column| (column, longest(column))).collect();
        let Some(available) = available else { return shown };
        let gaps = |count: usize| GAP * count.saturating_sub(1);
        let narrowest = |(column, width): &(usize, usize)| match self.is_whole(*column) {
            true => *width,
            false => NARROWEST.min(*width),
        };
        while shown.len() > 1
            && shown.iter().map(narrowest).sum::<usize>() + gaps(shown.len()) > available
        {
            let stays = |(column, _): &(usize, usize)| STAYS.contains(&self.header[*column]);
            let last = shown.iter().skip(1).rposition(|one| !stays(one));
            shown.remove(last.map_or(shown.len() - 1, |at| at + 1));
        }
        let taken = |shown: &[(usize, usize)]| {
            shown.iter().map(|(_, width)| width).sum::<usize>() + gaps(shown.len())
        };
        while taken(&shown) > available {
            let text = shown.iter_mut().filter(|(column, _)| !self.is_whole(*column));
            match text.max_by_key(|(_, width)| *width) {
                Some((_, widest)) if *widest > NARROWEST => *widest -= 1,
                _ => break,
            }
        }
        shown
    }

    fn line(&self, cells: &[String], widths: &[(usize, usize)], paint: Option<Paint>) -> String {
        let mut line = String::new();
        for &(column, width) in widths {
            let shown = cut(&cells[column], width);
            let fill = " ".repeat(width.saturating_sub(shown.chars().count()));
            let shown = match paint {
                Some(paint) if self.state_column == Some(column) => state_colour(paint, &shown),
                _ => shown,
            };
            match self.header[column].starts_with('>') {
                true => line.push_str(&(fill + &shown)),
                false => line.push_str(&(shown + &fill)),
            }
            line.push_str(&" ".repeat(GAP));
        }
        line.truncate(line.trim_end().len());
        line
    }
}

pub(crate) fn state_colour(paint: Paint, state: &str) -> String {
    match state {
        "running" => paint.green(state),
        "failed" | "lost" => paint.red(state),
        "paused" => paint.cyan(state),
        "starting" | "stopping" => paint.yellow(state),
        _ => paint.dim(state),
    }
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::{Paint, Table};

    fn sample() -> Table {
        let mut table = Table::new(&["NAME", "STATE", ">SIZE", "PURPOSE"]);
        table.row(vec![
            "my-app".into(),
            "running".into(),
            "1.2 MiB".into(),
            "refactor the auth module\nof everything".into(),
        ]);
        table.row(vec!["b".into(), "stopped".into(), "9 B".into(), String::new()]);
        table
    }

    #[test]
    fn without_a_terminal_nothing_is_cut() {
        assert_eq!(
            sample().laid_out(None, Paint::plain()),
            "\
NAME    STATE       SIZE  PURPOSE
my-app  running  1.2 MiB  refactor the auth module of everything
b       stopped      9 B
"
        );
    }

    #[test]
    fn a_narrow_terminal_cuts_the_widest_columns() {
        assert_eq!(
            sample().laid_out(Some(40), Paint::plain()),
            "\
NAME    STATE       SIZE  PURPOSE
my-app  running  1.2 MiB  refactor the …
b       stopped      9 B
"
        );
        for width in 0..80 {
            let text = sample().laid_out(Some(width), Paint::plain());
            // The first column is as wide as it is.
            let fits = text.lines().all(|line| line.chars().count() <= width.max(6));
            assert!(fits, "{width}: {text}");
            assert!(text.contains("my-app"), "{width}: {text}");
        }
    }

    #[test]
    fn at_80_columns_label_and_created_stay_and_units_are_whole() {
        let header = [
            "SNAPSHOT", "SANDBOX", ">GEN", "KIND", ">OWN", ">SHARED", "CREATED", "EXPIRES", "LABEL",
        ];
        let mut table = Table::new(&header);
        table.row(
            [
                "snp-01j8z3k5m6n7p8q9r0s1t2v3w4",
                "a-sandbox-with-a-long-name",
                "1204",
                "checkpoint",
                "118.4 MiB",
                "1023.9 MiB",
                "59m ago",
                "in 30d",
                "all tests green, before the refactoring",
            ]
            .map(str::to_owned)
            .to_vec(),
        );
        for width in [60, 80, 100, 120, 160] {
            let text = table.laid_out(Some(width), Paint::plain());
            assert!(text.contains("CREATED") && text.contains("LABEL"), "{width}: {text}");
            assert!(text.contains("59m ago") && text.contains("all t"), "{width}: {text}");
            for (column, unit) in [(" OWN", "118.4 MiB"), ("SHARED", "1023.9 MiB")] {
                assert_eq!(text.contains(column), text.contains(unit), "{width}: {text}");
            }
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
        }
        let text = table.laid_out(Some(80), Paint::plain());
        assert!(text.contains("118.4 MiB"), "{text}");
    }

    #[test]
    fn colours_only_where_wanted() {
        let plain = sample().laid_out(None, Paint::plain());
        assert!(!plain.contains('\x1b'));
        let coloured = sample().laid_out(None, Paint { on: true });
        assert!(coloured.contains("\x1b[32mrunning\x1b[0m"), "{coloured:?}");
    }
}
