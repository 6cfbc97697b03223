//! Which stages a build has, what each begins with, and which are needed.

use std::collections::{BTreeMap, BTreeSet};

use super::BuildRequest;
use crate::dockerfile::{Dockerfile, DockerfileError, InstructionKind, StageText, expand};

/// What a stage begins with, or copies from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BuildBase {
    /// Nothing.
    Scratch,
    /// An earlier stage.
    Stage(usize),
    /// An image.
    Image(String),
}

/// A stage of which it is known what it needs.
#[derive(Debug)]
pub(super) struct ResolvedStage {
    pub(super) base: BuildBase,
    /// How many steps it has, its `FROM` included.
    pub(super) steps: usize,
    /// The arguments it declares.
    pub(super) declares: BTreeSet<String>,
    pub(super) needed: bool,
    pub(super) target: bool,
}

/// Finds out what each stage needs.
pub(super) fn resolve(
    file: &Dockerfile,
    request: &BuildRequest,
) -> Result<Vec<ResolvedStage>, DockerfileError> {
    let args = global_args(file, request)?;
    let mut stages = Vec::with_capacity(file.stages.len());
    for (at, stage) in file.stages.iter().enumerate() {
        stages.push(ResolvedStage {
            base: base_of(file, at, stage, &args)?,
            steps: stage.steps.len() + 1,
            declares: declared(stage),
            needed: false,
            target: false,
        });
    }
    let last = stages.len() - 1;
    let target = match &request.target {
        None => last,
        Some(name) => stage_named(file, last + 1, name).ok_or_else(|| {
            let known: Vec<_> =
                file.stages.iter().filter_map(|stage| stage.name.as_deref()).collect();
            let known = match known.is_empty() {
                true => "its stages have no names".to_owned(),
                false => format!("there are {}", known.join(", ")),
            };
            let reason = format!("the Dockerfile has no stage `{name}` to build; {known}");
            DockerfileError::at(file.stages[last].line, reason)
        })?,
    };
    stages[target].target = true;
    let mut todo = vec![target];
    while let Some(at) = todo.pop() {
        if std::mem::replace(&mut stages[at].needed, true) {
            continue;
        }
        if let BuildBase::Stage(base) = stages[at].base {
            todo.push(base);
        }
        for step in &file.stages[at].steps {
            if let InstructionKind::Copy(copy) = &step.kind
                && let Some(from) = &copy.from
                && let BuildBase::Stage(from) = named(file, at, from, step.line)?
            {
                todo.push(from);
            }
        }
    }
    Ok(stages)
}

/// The arguments that `FROM` may use.
pub(super) fn global_args(
    file: &Dockerfile,
    request: &BuildRequest,
) -> Result<BTreeMap<String, String>, DockerfileError> {
    let mut args = platform_args();
    for (line, name, default) in &file.args {
        let value = match (request.args.get(name), default) {
            (Some(given), _) => Some(given.clone()),
            (None, Some(default)) => {
                let value = expand(default, file.escape, true, &|name| args.get(name).cloned());
                Some(value.map_err(|reason| DockerfileError::at(*line, reason))?)
            }
            (None, None) => None,
        };
        if let Some(value) = value {
            args.insert(name.clone(), value);
        }
    }
    Ok(args)
}

/// Arguments that every build has.
pub(super) fn platform_args() -> BTreeMap<String, String> {
    let arch = architecture();
    let mut args = BTreeMap::new();
    for side in ["BUILD", "TARGET"] {
        args.insert(format!("{side}PLATFORM"), format!("linux/{arch}"));
        args.insert(format!("{side}OS"), "linux".to_owned());
        args.insert(format!("{side}ARCH"), arch.to_owned());
        args.insert(format!("{side}VARIANT"), String::new());
    }
    args
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn declared(stage: &StageText) -> BTreeSet<String> {
    let args = stage.steps.iter().filter_map(|step| match &step.kind {
        InstructionKind::Arg(args) => Some(args),
        _ => None,
    });
    args.flatten().map(|(name, _)| name.clone()).collect()
}

fn base_of(
    file: &Dockerfile,
    at: usize,
    stage: &StageText,
    args: &BTreeMap<String, String>,
) -> Result<BuildBase, DockerfileError> {
    let wrong = |reason: String| DockerfileError::at(stage.line, reason);
    let expanded = |word: &str| {
        expand(word, file.escape, true, &|name| args.get(name).cloned()).map_err(wrong)
    };
    if let Some(platform) = &stage.from.platform {
        let platform = expanded(platform)?;
        let here = format!("linux/{}", architecture());
        if !platform.is_empty() && platform != here {
            return Err(wrong(format!(
                "the platform `{platform}` is not supported; this is {here}"
            )));
        }
    }
    let image = expanded(&stage.from.image)?;
    if image.is_empty() {
        return Err(wrong(format!(
            "`FROM {}` names no image: a variable is not set",
            stage.from.image
        )));
    }
    if image == "scratch" {
        return Ok(BuildBase::Scratch);
    }
    let stage_of = |name: &str| {
        let name = name.to_ascii_lowercase();
        file.stages[..at].iter().rposition(|stage| stage.name.as_deref() == Some(&name))
    };
    match stage_of(&image) {
        Some(earlier) => Ok(BuildBase::Stage(earlier)),
        None => later(file, at, &image, stage.line).map_or(Ok(BuildBase::Image(image)), Err),
    }
}

/// What `--from` means.
pub(super) fn named(
    file: &Dockerfile,
    at: usize,
    name: &str,
    line: usize,
) -> Result<BuildBase, DockerfileError> {
    if let Some(found) = stage_named(file, at, name) {
        return Ok(BuildBase::Stage(found));
    }
    if let Ok(number) = name.parse::<usize>() {
        let reason = match number < file.stages.len() {
            true => format!("stage {number} is not built before this one"),
            false => format!("there is no stage {number}; the first is 0"),
        };
        return Err(DockerfileError::at(line, reason));
    }
    match later(file, at, name, line) {
        Some(error) => Err(error),
        None => Ok(BuildBase::Image(name.to_owned())),
    }
}

/// A stage among the first `before`.
fn stage_named(file: &Dockerfile, before: usize, name: &str) -> Option<usize> {
    let lower = name.to_ascii_lowercase();
    let by_name =
        file.stages[..before].iter().rposition(|stage| stage.name.as_deref() == Some(&lower));
    by_name.or_else(|| name.parse().ok().filter(|number| *number < before))
}

/// Why a name cannot be used: a later stage has it, so that the stages would need each other.
fn later(file: &Dockerfile, at: usize, name: &str, line: usize) -> Option<DockerfileError> {
    let name = name.to_ascii_lowercase();
    let stage = file.stages[at..].iter().find(|stage| stage.name.as_deref() == Some(&name))?;
    let reason = match stage.line == file.stages[at].line {
        true => format!("stage `{name}` needs itself; use an earlier stage or an image"),
        false => format!(
            "stage `{name}` comes later, in line {}; a stage can only use earlier ones",
            stage.line
        ),
    };
    // `FROM debian AS debian` means the image.
    (stage.line != line).then(|| DockerfileError::at(line, reason))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{BuildBase, ResolvedStage, resolve};
    use crate::dockerfile::parse;
    use crate::engine::builds::BuildRequest;

    fn request(target: Option<&str>, args: &[(&str, &str)]) -> BuildRequest {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        BuildRequest {
            context: "x".into(),
            dockerfile: "Dockerfile".to_owned(),
            name: "x".to_owned(),
            args: args.iter().map(own).collect(),
            target: target.map(str::to_owned),
            secrets: BTreeMap::new(),
            no_cache: false,
            by: None,
        }
    }

    fn resolved(text: &str, target: Option<&str>) -> Result<Vec<ResolvedStage>, String> {
        let file = parse(text).expect(text);
        resolve(&file, &request(target, &[("V", "13")])).map_err(|error| error.to_string())
    }

    #[test]
    fn only_what_the_target_needs_is_built() {
        let text = "ARG V=12\nFROM debian:$V AS a\nFROM scratch AS b\nFROM a AS c\nCOPY --from=b x /\nFROM c AS d\n";
        let needed = |target| -> Vec<bool> {
            resolved(text, target).expect(text).iter().map(|stage| stage.needed).collect()
        };
        assert_eq!(needed(None), [true; 4]);
        assert_eq!(needed(Some("B")), [false, true, false, false]);
        assert_eq!(needed(Some("2")), [true, true, true, false]);
        let stages = resolved(text, None).expect(text);
        assert_eq!(stages[0].base, BuildBase::Image("debian:13".to_owned()));
        assert_eq!((&stages[1].base, &stages[2].base), (&BuildBase::Scratch, &BuildBase::Stage(0)));
    }

    #[test]
    fn stages_that_are_not_there_yet_are_told_with_their_line() {
        for (text, target, told) in [
            (
                "FROM a AS x\nCOPY --from=y q /\nFROM b AS y",
                Some("x"),
                "line 2: stage `y` comes later, in line 3",
            ),
            ("FROM y AS x\nFROM x AS y", None, "line 1: stage `y` comes later, in line 2"),
            ("FROM a AS x\nCOPY --from=x q /", None, "line 2: stage `x` needs itself"),
            ("FROM a\nCOPY --from=7 q /", None, "line 2: there is no stage 7"),
            ("FROM a\nCOPY --from=0 q /", None, "line 2: stage 0 is not built before"),
            (
                "FROM a AS x\nFROM b",
                Some("z"),
                "line 2: the Dockerfile has no stage `z` to build; there are x",
            ),
            ("FROM $NO", None, "line 1: `FROM $NO` names no image"),
            (
                "FROM --platform=plan9/mips a",
                None,
                "line 1: the platform `plan9/mips` is not supported",
            ),
        ] {
            let said = resolved(text, target).expect_err(text);
            assert!(said.starts_with(told), "{text:?}: {said}");
        }
        let stages = resolved("FROM debian AS debian", None).expect("the image is meant");
        assert_eq!(stages[0].base, BuildBase::Image("debian".to_owned()));
    }
}
