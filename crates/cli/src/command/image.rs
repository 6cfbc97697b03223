//! `keep image`: pulls, imports, customizes, lists and deletes images, with a bar for what takes long.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use sandkeep_client::types::{AddDirectory, CustomizeRequest, Image, ImageProgress, PullRequest};
use sandkeep_client::{Fetching, Upload};

use super::{Context, bytes, facts, for_each, or_dash, pairs};
use crate::args::ImageCommand;
use crate::failure::Failure;
use crate::screen::{Paint, Table};
use crate::when;

pub(super) async fn image(context: &Context, command: ImageCommand) -> Result<(), Failure> {
    match command {
        ImageCommand::Ls => {
            let all = context.client.images().await?;
            context.screen.answer(&all, |all| context.screen.table(&image_table(all)))
        }
        ImageCommand::Pull { reference, quiet } => {
            let request = PullRequest { reference };
            let fetching = context.client.pull_image(&request).await?;
            arrive(context, fetching, quiet).await
        }
        ImageCommand::Import { file, name, quiet } => import(context, file, &name, quiet).await,
        ImageCommand::Customize { name, from, add, env, path } => {
            let add = add.into_iter().map(|(from, to)| {
                let from = from.to_string_lossy().into_owned();
                AddDirectory { from, to }
            });
            let env = env.into_iter().collect();
            let request =
                CustomizeRequest { name, from: Some(from), add: add.collect(), env, path };
            arrive(context, context.client.customize_image(&request).await?, true).await
        }
        ImageCommand::Build(args) => super::image_build::build(context, args).await,
        ImageCommand::Prune => {
            let pruned = context.client.prune_builds().await?;
            context.screen.answer(&pruned, |pruned| format!("{} steps deleted\n", pruned.steps))
        }
        ImageCommand::Rm { names } => {
            for_each(context, &names, async |name| {
                context.client.delete_image(&name).await?;
                context.screen.answer(&serde_json::json!({}), |_| format!("{name}  deleted\n"))
            })
            .await
        }
        ImageCommand::Inspect { name } => {
            let image = context.client.image(&name).await?;
            context.screen.answer(&image, |image| described(context.screen.paint, image))
        }
    }
}

fn image_table(images: &[Image]) -> Table {
    let mut table =
        Table::new(&["IMAGE", "DIGEST", ">LAYERS", ">SIZE", ">DISK", "CREATED", "SOURCE"]);
    for image in images {
        let digest = image.digest.strip_prefix("sha256:").unwrap_or(&image.digest);
        table.row(vec![
            image.name.clone(),
            digest.chars().take(12).collect(),
            image.layers.to_string(),
            bytes(image.size_bytes + image.host_bytes),
            bytes(image.size_bytes),
            when::ago(&image.created_at),
            image.source.clone(),
        ]);
    }
    table
}

fn described(paint: Paint, image: &Image) -> String {
    facts(
        paint,
        &[
            ("name", image.name.clone()),
            ("digest", image.digest.clone()),
            ("layers", image.layers.to_string()),
            ("size", bytes(image.size_bytes + image.host_bytes)),
            ("disk space", bytes(image.size_bytes)),
            ("shared with host", bytes(image.host_bytes)),
            ("user", or_dash(image.user.clone())),
            ("cwd", or_dash(image.cwd.clone())),
            ("env", pairs(&image.env)),
            ("entrypoint", or_dash(words(&image.entrypoint))),
            ("cmd", or_dash(words(&image.cmd))),
            (
                "ports",
                or_dash(Some(image.exposed_ports.join(" ")).filter(|ports| !ports.is_empty())),
            ),
            ("labels", pairs(&image.labels)),
            ("source", image.source.clone()),
            ("customized", if image.customized || image.dressed { "yes" } else { "no" }.to_owned()),
            ("created", when::ago(&image.created_at)),
        ],
    )
}

fn words(argv: &[String]) -> Option<String> {
    (!argv.is_empty()).then(|| serde_json::to_string(argv).unwrap_or_default())
}

async fn import(context: &Context, file: PathBuf, name: &str, quiet: bool) -> Result<(), Failure> {
    let cannot = |error| Failure::caused(format!("cannot read `{}`", file.display()), error);
    if file == Path::new("-") {
        let fetching = context
            .client
            .import_image(name, Upload::channel(crate::terminal::keystrokes()))
            .await?;
        return arrive(context, fetching, quiet).await;
    }
    let metadata = tokio::fs::metadata(&file).await.map_err(cannot)?;
    if metadata.is_dir() {
        let hint = format!(
            "pack it first: tar -C {} -cf - . | keep image import {name} -",
            file.display()
        );
        return Err(Failure::here(format!("`{}` is a directory", file.display())).with_hint(hint));
    }
    let opened = tokio::fs::File::open(&file).await.map_err(cannot)?;
    let bar = bar_if(!quiet, Some(metadata.len()));
    bar.set_message("upload");
    let reader = super::tar::Counted::new(opened, bar.clone());
    let fetching = context.client.import_image(name, Upload::reader(reader)).await;
    bar.finish_and_clear();
    arrive(context, fetching?, quiet).await
}

/// Shows how far an image has come, and then the image.
async fn arrive(context: &Context, mut fetching: Fetching, quiet: bool) -> Result<(), Failure> {
    let bars = MultiProgress::new();
    let mut known: HashMap<String, ProgressBar> = HashMap::new();
    while let Some(news) = fetching.next().await? {
        match news {
            ImageProgress::Progress { what, done, total } => {
                let bar = known.entry(what.clone()).or_insert_with(|| {
                    let bar = bar_if(!quiet, total);
                    bar.set_message(what);
                    bars.add(bar)
                });
                bar.set_position(done);
                if total == Some(done) {
                    bar.finish();
                }
            }
            ImageProgress::Done { image } => {
                // What stays on the screen is the answer.
                let _ = bars.clear();
                return context.screen.answer(&image, |image| {
                    let size = format!(", {}", bytes(image.size_bytes + image.host_bytes));
                    format!("{}  {} layers{size}\n", image.name, image.layers)
                });
            }
            ImageProgress::Error { .. } => {}
        }
    }
    Err(Failure::here("the connection ended before the result of the image"))
}

/// A bar on standard error, or a hidden one.
pub(super) fn bar_if(wanted: bool, total: Option<u64>) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{msg:24!} {wide_bar} {bytes:>10} / {total_bytes:10} {eta:>4}",
        ),
        None => (ProgressBar::no_length(), "{msg:24!} {spinner} {human_pos:>12} {elapsed:>6}"),
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
