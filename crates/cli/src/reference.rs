//! Files generated from `keep`'s own definitions: the settings file with every setting, and the
//! manual pages.
//!
//! Both are made of the help texts: the settings of those of `keep serve`, the pages of all of them. So there is one place to
//! write them, and tests hold that place to what the program does.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;

use crate::args::{self, SERVE_HELP};
use crate::failure::Failure;

/// How the help marks a setting that has no default. What follows on the line is the setting's description.
const NONE: &str = "none by default; ";

const HEAD: &str = "\
# Settings of the Sandkeep server, in TOML.
#
# Every setting is here, commented out, with its default; those without one have an example.
# Remove the # in front of a setting to change it. Then:
#
#   keep config check              checks this file
#   systemctl restart sandkeep     applies it; sandboxes keep running
#
# Options and environment variables of `keep serve` take precedence.
";

/// A line of the settings in the help of `keep serve`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettingLine<'a> {
    /// `[storage]  # what is kept`
    Section { name: &'a str, about: &'a str },
    /// `trash_grace = "1h"  # how long deleted sandboxes can be restored`
    Setting { key: &'a str, value: &'a str, about: &'a str, is_default: bool },
}

/// The settings, in the order of the help.
pub(crate) fn settings() -> impl Iterator<Item = SettingLine<'static>> {
    SERVE_HELP.lines().filter_map(|line| line.strip_prefix("  ")).filter_map(line)
}

fn line(text: &str) -> Option<SettingLine<'_>> {
    let text = text.trim();
    // No example has this in its value.
    let (code, about) = text.split_once("  # ").unwrap_or((text, ""));
    let (code, about) = (code.trim(), about.trim());
    if let Some(name) = code.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return Some(SettingLine::Section { name, about });
    }
    let (key, value) = code.split_once(" = ")?;
    let (about, is_default) = match about.strip_prefix(NONE) {
        Some(about) => (about, false),
        None => (about, true),
    };
    Some(SettingLine::Setting { key: key.trim(), value: value.trim(), about, is_default })
}

/// The settings file that packages install.
pub(crate) fn settings_file() -> String {
    let mut text = HEAD.to_owned();
    for line in settings() {
        match line {
            SettingLine::Section { name, about } => {
                text.push_str(&format!("\n\n# {}\n[{name}]\n", sentence(about)));
            }
            SettingLine::Setting { key, value, about, is_default } => {
                let about = match is_default {
                    true => sentence(about),
                    false => format!("{}. No default; an example:", sentence(about)),
                };
                text.push_str(&format!("\n# {about}\n#{key} = {value}\n"));
            }
        }
    }
    text
}

fn sentence(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

/// Writes a page for `keep` and one for each of its commands, like `keep-image-pull.1`.
pub(crate) fn write_man_pages(dir: &Path) -> Result<(), Failure> {
    let cannot =
        |error| Failure::caused(format!("cannot write manual pages to `{}`", dir.display()), error);
    fs::create_dir_all(dir).map_err(cannot)?;
    let mut keep = args::command();
    // Names the commands after those they belong to.
    keep.build();
    write_pages_of(keep, dir).map_err(cannot)
}

fn write_pages_of(command: Command, dir: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_pages_of(inner.clone(), dir)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let more = command.get_after_long_help().or_else(|| command.get_after_help());
    let more = more.map(ToString::to_string).unwrap_or_default();
    // The renderer would fill the lines of examples and settings.
    let command = command.after_help(None::<&str>).after_long_help(None::<&str>);
    let mut page = Vec::new();
    clap_mangen::Man::new(command)
        .title(name.to_uppercase())
        .source(concat!("sandkeep ", env!("CARGO_PKG_VERSION")))
        .manual("Sandkeep")
        .render(&mut page)?;
    if !more.is_empty() {
        page.extend(notes(&more).into_bytes());
    }
    fs::write(dir.join(format!("{name}.1")), page)
}

/// A section of prose, with indented lines as they are.
fn notes(text: &str) -> String {
    let mut section = ".SH NOTES\n".to_owned();
    let mut verbatim = false;
    for line in text.lines() {
        if line.starts_with("  ") != verbatim && !line.is_empty() {
            verbatim = !verbatim;
            section.push_str(if verbatim { ".PP\n.nf\n" } else { ".fi\n.PP\n" });
        }
        match line {
            "" if !verbatim => section.push_str(".PP\n"),
            line => {
                let line = line.replace('\\', "\\e").replace('-', "\\-");
                // What begins with one of these would be an instruction.
                let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
                section.push_str(&format!("{guard}{line}\n"));
            }
        }
    }
    section + if verbatim { ".fi\n" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::{SettingLine, line, notes, settings, settings_file, write_man_pages};
    use crate::args;

    #[test]
    fn lines_of_the_help_are_understood() {
        let setting =
            |key, value, about, is_default| SettingLine::Setting { key, value, about, is_default };
        for (text, read) in [
            (
                "[gateway]      # ports",
                Some(SettingLine::Section { name: "gateway", about: "ports" }),
            ),
            ("wait = \"30s\"   # how long", Some(setting("wait", "\"30s\"", "how long", true))),
            (
                "hosts.\"a.b\" = [\"10.0.0.5\"]  # none by default; fixed # answers",
                Some(setting("hosts.\"a.b\"", "[\"10.0.0.5\"]", "fixed # answers", false)),
            ),
            ("some prose", None),
        ] {
            assert_eq!(line(text), read, "{text}");
        }
        assert!(settings().count() > 30);
    }

    #[test]
    fn every_setting_is_commented_out_and_explained() {
        let text = settings_file();
        assert_eq!(text.parse::<toml::Table>().unwrap().values().map(inner).sum::<usize>(), 0);
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate().filter(|(_, line)| line.contains(" = ")) {
            assert!(line.starts_with('#') && !line.starts_with("# "), "{line}");
            let about = lines[number - 1];
            assert!(about.starts_with("# ") && about.len() > 8, "`{line}` has no description");
        }
    }

    fn inner(value: &toml::Value) -> usize {
        value.as_table().map_or(1, toml::Table::len)
    }

    #[test]
    fn examples_in_pages_keep_their_lines() {
        let text = "Examples:\n  keep ls   # a\\b\n\n  .keep\nMore, and\n'more'";
        let page = ".SH NOTES\nExamples:\n.PP\n.nf\n  keep ls   # a\\eb\n\n  .keep\n.fi\n.PP\nMore, and\n\\&'more'\n";
        assert_eq!(notes(text), page);
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        write_man_pages(&pages).unwrap();
        let mut keep = args::command();
        keep.build();
        let mut paths = vec![("keep".to_owned(), &keep)];
        let mut count = 0;
        while let Some((path, command)) = paths.pop() {
            let page = std::fs::read_to_string(pages.join(format!("{path}.1"))).expect(&path);
            assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{path}");
            count += 1;
            let inner = command.get_subcommands();
            paths.extend(inner.map(|inner| (format!("{path}-{}", inner.get_name()), inner)));
        }
        assert_eq!(pages.read_dir().unwrap().count(), count);
        let serve = std::fs::read_to_string(pages.join("keep-serve.1")).unwrap();
        let (_, settings) = serve.split_once(".nf\n").expect("the settings, line by line");
        assert!(settings.contains("\n  trash_grace = "), "{serve}");
        assert!(serve.contains(".TH KEEP\\-SERVE") || serve.contains(".TH KEEP-SERVE"), "{serve}");
    }
}
