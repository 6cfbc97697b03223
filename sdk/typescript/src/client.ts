/** A server: its sandboxes, and everything beside them. */

import { Sandbox, download } from "./sandbox.js";
import type { SandboxSettings } from "./sandbox.js";
import { BuildStream, EventStream, ProgressStream } from "./streams.js";
import { Transport, given } from "./transport.js";
import type { Body, Call, ClientOptions, Query } from "./transport.js";
import type * as types from "./types.js";

const tagged = (tags?: Record<string, string>) => Object.entries(tags ?? {}).map(([name, value]) => `${name}=${value}`);

const base64 = (text: string) => btoa(String.fromCharCode(...new TextEncoder().encode(text)));

/** How an image is built. */
export interface BuildOptions {
  /** The Dockerfile's path in the context; `Dockerfile` if absent. */
  dockerfile?: string;
  /** Values of `ARG`s. */
  args?: Record<string, string>;
  /** The stage to build; the last if absent. */
  target?: string;
  /** Secrets by id. */
  secrets?: Record<string, string>;
  /** Whether steps are made that are in the cache. */
  noCache?: boolean;
}

/** A server. Without options it is the one that `SANDKEEP_URL` and `SANDKEEP_KEY` name, or the one on this machine. */
export class Sandkeep {
  readonly transport: Transport;
  /** Snapshots of all sandboxes. */
  readonly snapshots: Snapshots;
  /** Agents' work: queued, reviewed, accepted or rejected. */
  readonly runs: Runs;
  /** Questions that somebody answers before work goes on. */
  readonly approvals: Approvals;
  /** Secrets of the project. */
  readonly secrets: Secrets;
  /** Volumes that outlive sandboxes. */
  readonly drives: Drives;
  /** Images that sandboxes start from. */
  readonly images: Images;
  /** Events, sent to an address of yours. */
  readonly webhooks: Webhooks;
  /** Projects, their keys and policies. */
  readonly projects: Projects;
  /** Deleted sandboxes. */
  readonly trash: Trash;
  /** The log of who did what. */
  readonly audit: Audit;

  constructor(options: ClientOptions = {}) {
    this.transport = new Transport(options);
    this.snapshots = new Snapshots(this.transport);
    this.runs = new Runs(this.transport);
    this.approvals = new Approvals(this.transport);
    this.secrets = new Secrets(this.transport);
    this.drives = new Drives(this.transport);
    this.images = new Images(this.transport);
    this.webhooks = new Webhooks(this.transport);
    this.projects = new Projects(this.transport);
    this.trash = new Trash(this);
    this.audit = new Audit(this.transport);
  }

  // Sandboxes

  /** The sandbox of that name, without asking whether there is one. */
  sandbox(name: string): Sandbox {
    return new Sandbox(this, name);
  }

  /** The sandbox of that name, started. It is created, with these settings, if there is none. */
  async getOrCreate(name: string, settings: SandboxSettings = {}): Promise<Sandbox> {
    const json = { name, if_exists: "get", ...settings };
    const { sandbox } = await this.transport.call("create_sandbox", { json });
    return new Sandbox(this, sandbox.name, sandbox);
  }

  /** A new sandbox, started unless `start` is false. Without a name it gets one. `from` is a snapshot it begins with. */
  async create(name?: string, settings: Omit<types.CreateSandbox, "name" | "if_exists"> = {}): Promise<Sandbox> {
    const json = given({ name, ...settings });
    const { sandbox } = await this.transport.call("create_sandbox", { json });
    return new Sandbox(this, sandbox.name, sandbox);
  }

  /** The sandbox of that name. Never wakes it. */
  async get(name: string): Promise<Sandbox> {
    const sandbox = new Sandbox(this, name);
    await sandbox.refresh();
    return sandbox;
  }

  /** Sandboxes, newest first. */
  async *sandboxes(
    options: {
      tags?: Record<string, string>;
      state?: types.State;
      name_prefix?: string;
      class?: types.Class;
      limit?: number;
    } = {},
  ): AsyncGenerator<Sandbox, void> {
    const { tags, ...rest } = options;
    const query = { ...rest, tag: tagged(tags) };
    for await (const one of this.transport.pages<types.Sandbox>("list_sandboxes", { query })) {
      yield new Sandbox(this, one.name, one);
    }
  }

  /** The forks that one `forkMany` made. */
  async group(group: string): Promise<Sandbox[]> {
    const found = await this.transport.all<types.Sandbox>("list_forks", { query: { group } });
    return found.map((one) => new Sandbox(this, one.name, one));
  }

  /** What differs between two points: sandboxes, snapshots, labels. */
  diff(from: string, to: string, options: { paths?: string[]; limit?: number } = {}): Promise<types.Diff> {
    const query = { from, to, path: options.paths, limit: options.limit };
    return this.transport.call("diff", { query });
  }

  /** The same as a patch in git's format. */
  patch(
    from: string,
    to: string,
    options: { paths?: string[]; relative?: string; binary?: boolean } = {},
  ): Promise<Uint8Array> {
    const { paths, ...rest } = options;
    return this.transport.read("diff_patch", { query: { from, to, path: paths, ...rest } });
  }

  // The server

  /** What happens, without gaps: after a break it goes on after the last event that came. */
  events(
    options: {
      sandbox?: string;
      tags?: Record<string, string>;
      kinds?: string[];
      cursor?: string;
      since?: string;
      follow?: boolean;
      all_projects?: boolean;
      signal?: AbortSignal;
    } = {},
  ): EventStream<types.Event> {
    const { sandbox, tags, kinds, cursor, since, follow, all_projects, signal } = options;
    const query: Query = { sandbox, tag: tagged(tags), kind: kinds, cursor, since, follow, all_projects };
    return new EventStream<types.Event>(this.transport, "events", query, follow ?? true, signal);
  }

  /** Whether the server works, and how many sandboxes it still recovers. */
  health(): Promise<types.Health> {
    return this.transport.call("health");
  }

  /** Whether the server takes work. Throws at once, with the reason, if it does not. */
  ready(): Promise<types.Readiness> {
    return this.transport.call("ready", { retry: false });
  }

  /** Whose key this is. */
  whoAmI(): Promise<types.WhoAmI> {
    return this.transport.call("who_am_i");
  }

  /** Disk space. */
  usage(): Promise<types.SpaceUsage> {
    return this.transport.call("usage");
  }

  /** What the running sandboxes use at this moment. */
  stats(): Promise<types.SandboxStats[]> {
    return this.transport.all("list_stats");
  }

  /** Figures for Prometheus. */
  async metrics(): Promise<string> {
    return new TextDecoder().decode(await this.transport.read("metrics"));
  }

  /** Stored data that is damaged. */
  damage(): Promise<types.Damage[]> {
    return this.transport.all("damage");
  }

  /** Checks the data directory. */
  fsck(options: types.FsckRequest = {}): Promise<types.Fsck> {
    return this.transport.call("fsck", { json: options, repeatable: true, timeout: 0 });
  }

  /** A token for another service's client. */
  issueToken(request: types.IssueToken): Promise<types.Token> {
    return this.transport.call("issue_token", { json: request });
  }

  /** Files that the guard moved aside. */
  quarantine(): Promise<types.Quarantine[]> {
    return this.transport.all("list_quarantine");
  }

  /** Deletes files that the guard moved aside. */
  deleteQuarantine(id: string): Promise<types.Quarantine> {
    return this.transport.call("delete_quarantine", { path: { id } });
  }
}

/** Snapshots of all sandboxes. */
export class Snapshots {
  constructor(private readonly transport: Transport) {}

  /** Snapshots, newest first. */
  list(options: { sandbox?: string; limit?: number } = {}): AsyncGenerator<types.Snapshot, void> {
    return this.transport.pages("list_snapshots", { query: options });
  }

  /** A snapshot. */
  get(id: string): Promise<types.Snapshot> {
    return this.transport.call("get_snapshot", { path: { id } });
  }

  /** Deletes a snapshot. */
  delete(id: string, options: { force?: boolean } = {}): Promise<types.SnapshotDeleted> {
    return this.transport.call("delete_snapshot", { path: { id }, query: options });
  }

  /** All files of a snapshot, as a tar. */
  async *export(id: string): AsyncGenerator<Uint8Array, void> {
    yield* download(await this.transport.send("export_snapshot", { path: { id } }));
  }
}

/** Agents' work: queued, reviewed, accepted or rejected. docs/RUNS.md has the rules. */
export class Runs {
  constructor(private readonly transport: Transport) {}

  /** Queues a run. */
  start(run: types.StartRun): Promise<types.Run> {
    return this.transport.call("start_run", { json: run });
  }

  /** Runs, newest first. */
  list(
    options: { status?: types.RunStatus; sandbox?: string; owner?: string; repository?: string; limit?: number } = {},
  ): AsyncGenerator<types.Run, void> {
    return this.transport.pages("list_runs", { query: options });
  }

  /** A run. */
  get(id: string): Promise<types.Run> {
    return this.transport.call("get_run", { path: { id } });
  }

  /** Waits until it waits for somebody or is over, at most so many seconds. */
  wait(id: string, seconds = 60): Promise<types.Run> {
    return this.transport.call("get_run", { path: { id }, query: { wait: seconds }, timeout: (seconds + 30) * 1000 });
  }

  /** Ends it. Its sandbox is kept. */
  cancel(id: string, options: types.CancelRun = {}): Promise<types.Run> {
    return this.transport.call("cancel_run", { path: { id }, json: options });
  }

  /** Says that the harness is alive. */
  heartbeat(id: string, options: types.RunHeartbeat = {}): Promise<types.Run> {
    return this.transport.call("run_heartbeat", { path: { id }, json: options, repeatable: true });
  }

  /** Says that the work of a harness is done, or failed. */
  finish(id: string, options: types.FinishRun = {}): Promise<types.Run> {
    return this.transport.call("finish_run", { path: { id }, json: options });
  }

  /** What it changed, did and was in contact with. */
  review(id: string): Promise<types.RunReview> {
    return this.transport.call("review_run", { path: { id } });
  }

  /** Reviews the present state instead of the one at its end. */
  pinAgain(id: string): Promise<types.RunReview> {
    return this.transport.call("pin_run_again", { path: { id } });
  }

  /** Accepts its result. Needs a key that may approve. */
  accept(id: string, options: types.AcceptRun = {}): Promise<types.RunAccepted> {
    return this.transport.call("accept_run", { path: { id }, json: options });
  }

  /** Rejects its result. Needs a key that may approve. */
  reject(id: string, options: types.RejectRun = {}): Promise<types.Run> {
    return this.transport.call("reject_run", { path: { id }, json: options });
  }
}

/** Questions that somebody answers before work goes on. */
export class Approvals {
  constructor(private readonly transport: Transport) {}

  /** Approvals, newest first. */
  list(
    options: { status?: types.ApprovalStatus; sandbox?: string; run?: string; limit?: number } = {},
  ): AsyncGenerator<types.Approval, void> {
    return this.transport.pages("list_approvals", { query: options });
  }

  /** An approval. */
  get(id: string): Promise<types.Approval> {
    return this.transport.call("get_approval", { path: { id } });
  }

  /** Waits for the answer, at most so many seconds. */
  wait(id: string, seconds = 60): Promise<types.Approval> {
    const query = { wait: seconds };
    return this.transport.call("get_approval", { path: { id }, query, timeout: (seconds + 30) * 1000 });
  }

  /** Approves or denies. Needs a key that may approve. */
  answer(id: string, answer: types.ApprovalAnswer, comment?: string): Promise<types.Approval> {
    return this.transport.call("answer_approval", { path: { id }, json: given({ answer, comment }) });
  }
}

/** Secrets of the project. Values are sent and never returned. */
export class Secrets {
  constructor(private readonly transport: Transport) {}

  /** All secrets. */
  list(): Promise<types.Secret[]> {
    return this.transport.call("list_secrets");
  }

  /** A secret. */
  get(name: string): Promise<types.Secret> {
    return this.transport.call("get_secret", { path: { name } });
  }

  /** Sets a secret. */
  set(name: string, value: string, options: Omit<types.SetSecret, "value"> = {}): Promise<types.Secret> {
    return this.transport.call("set_secret", { path: { name }, json: { value, ...options } });
  }

  /** Deletes a secret. */
  delete(name: string): Promise<types.Secret> {
    return this.transport.call("delete_secret", { path: { name } });
  }
}

/** Volumes that outlive sandboxes. */
export class Drives {
  constructor(private readonly transport: Transport) {}

  /** All drives. */
  list(options: { name_prefix?: string } = {}): AsyncGenerator<types.Drive, void> {
    return this.transport.pages("list_drives", { query: options });
  }

  /** A drive. */
  get(name: string): Promise<types.Drive> {
    return this.transport.call("get_drive", { path: { name } });
  }

  /** Creates a drive. */
  create(name: string, options: Omit<types.CreateDrive, "name"> = {}): Promise<types.Drive> {
    return this.transport.call("create_drive", { json: { name, ...options } });
  }

  /** A new drive with this one's content. */
  fork(name: string, to: string): Promise<types.Drive> {
    return this.transport.call("fork_drive", { path: { name }, json: { name: to } });
  }

  /** Puts files that a sandbox made or changed, those that the globs name, into a drive: all or nothing. */
  promote(
    name: string,
    sandbox: string,
    only: string[],
    options: Omit<types.PromoteIntoDrive, "from" | "only"> = {},
  ): Promise<types.PromotedIntoDrive> {
    const json = { from: sandbox, only, ...options };
    return this.transport.call("promote_into_drive", { path: { name }, json, repeatable: true });
  }

  /** Deletes a drive. */
  delete(name: string): Promise<types.Drive> {
    return this.transport.call("delete_drive", { path: { name } });
  }
}

/** Images that sandboxes start from. */
export class Images {
  constructor(private readonly transport: Transport) {}

  /** All images. */
  list(): Promise<types.Image[]> {
    return this.transport.all("list_images");
  }

  /** An image. */
  get(name: string): Promise<types.Image> {
    return this.transport.call("get_image", { path: { name } });
  }

  /** Removes an image. */
  remove(name: string): Promise<void> {
    return this.transport.done("remove_image", { path: { name } });
  }

  /** Pulls an image from a registry. Iterate over its progress, or call `done`. */
  pull(reference: string): Promise<ProgressStream> {
    return this.#work("pull_image", { json: { reference } });
  }

  /** Imports an archive or a directory that is on the server. */
  importPath(path: string, name: string): Promise<ProgressStream> {
    return this.#work("import_image", { json: { path, name } });
  }

  /** Imports an archive from here. */
  importArchive(archive: Body, name: string): Promise<ProgressStream> {
    const headers = { "Content-Type": "application/x-tar" };
    return this.#work("import_image", { query: { name }, body: archive, headers });
  }

  /**
   * Builds an image from a Dockerfile. `context` is a tar archive with the Dockerfile and all files it may copy. The build
   * ends when its stream is closed. Secrets are for `RUN --mount=type=secret`, 8 KiB together.
   */
  async build(context: Body, name: string, options: BuildOptions = {}): Promise<BuildStream> {
    const { args, secrets, ...rest } = options;
    const headers: Record<string, string> = { "Content-Type": "application/x-tar" };
    const packed = Object.entries(secrets ?? {}).map(([id, value]) => `${id}=${base64(value)}`);
    if (packed.length > 0) headers["Sandkeep-Build-Secret"] = packed.join(",");
    const query = given({
      name,
      dockerfile: rest.dockerfile,
      target: rest.target,
      no_cache: rest.noCache || undefined,
      arg: Object.entries(args ?? {}).map(([key, value]) => `${key}=${value}`),
    });
    return new BuildStream(await this.transport.send("build_image", { query, body: context, headers, timeout: 0 }));
  }

  /** Deletes what builds of the project have kept for the next one. Images stay. */
  prune(): Promise<types.PrunedBuilds> {
    return this.transport.call("prune_builds");
  }

  /** Makes an image of another one and directories of the server. */
  customize(request: types.CustomizeRequest): Promise<ProgressStream> {
    return this.#work("customize_image", { json: request });
  }

  async #work(operation: "pull_image" | "import_image" | "customize_image", call: Call): Promise<ProgressStream> {
    return new ProgressStream(await this.transport.send(operation, { ...call, timeout: 0 }));
  }
}

/** Events of the project, sent to an address of yours. */
export class Webhooks {
  constructor(private readonly transport: Transport) {}

  /** All webhooks. */
  list(): Promise<types.Webhook[]> {
    return this.transport.all("list_webhooks");
  }

  /** A webhook, with its last deliveries. */
  get(id: string): Promise<types.Webhook> {
    return this.transport.call("get_webhook", { path: { id } });
  }

  /** Creates a webhook. The answer has its secret, this once. */
  create(request: types.CreateWebhook): Promise<types.NewWebhook> {
    return this.transport.call("create_webhook", { json: request });
  }

  /** Changes a webhook. */
  update(id: string, change: types.UpdateWebhook): Promise<types.Webhook> {
    return this.transport.call("update_webhook", { path: { id }, json: change });
  }

  /** Another secret. The former one signs too, unless `only`. */
  rotateSecret(id: string, options: types.RotateWebhookSecret = {}): Promise<types.NewWebhook> {
    return this.transport.call("rotate_webhook_secret", { path: { id }, json: options });
  }

  /** Sends a test event. */
  test(id: string): Promise<types.WebhookDelivery> {
    return this.transport.call("test_webhook", { path: { id } });
  }

  /** Deletes a webhook. */
  delete(id: string): Promise<void> {
    return this.transport.done("delete_webhook", { path: { id } });
  }
}

/** Projects, their keys and policies. Needs an admin key. */
export class Projects {
  constructor(private readonly transport: Transport) {}

  /** All projects. */
  list(): Promise<types.Project[]> {
    return this.transport.all("list_projects");
  }

  /** Creates a project. */
  create(name: string): Promise<types.Project> {
    return this.transport.call("create_project", { json: { name } });
  }

  /** Deletes a project that has nothing in it. */
  delete(project: string): Promise<void> {
    return this.transport.done("delete_project", { path: { project } });
  }

  /** Keys of a project. */
  keys(project: string): Promise<types.Key[]> {
    return this.transport.all("list_keys", { path: { project } });
  }

  /** Creates a key. The answer has it, this once. */
  createKey(project: string, request: types.CreateKey): Promise<types.NewKey> {
    return this.transport.call("create_key", { path: { project }, json: request });
  }

  /** Revokes a key. */
  revokeKey(project: string, key: string): Promise<void> {
    return this.transport.done("revoke_key", { path: { project, key } });
  }

  /** What its sandboxes may reach. */
  network(project: string): Promise<types.ProjectNetwork> {
    return this.transport.call("get_project_network", { path: { project } });
  }

  /** Changes what its sandboxes may reach, and how many connections they may have open together. */
  setNetwork(project: string, network: types.ProjectNetwork): Promise<types.ProjectNetwork> {
    return this.transport.call("set_project_network", { path: { project }, json: network });
  }

  /** How many runs it may have, and who answers. */
  governance(project: string): Promise<types.ProjectRuns> {
    return this.transport.call("get_project_runs", { path: { project } });
  }

  /** Changes how many runs it may have, and who answers. */
  setGovernance(project: string, rules: types.ProjectRuns): Promise<types.ProjectRuns> {
    return this.transport.call("set_project_runs", { path: { project }, json: rules });
  }
}

/** Deleted sandboxes. */
export class Trash {
  constructor(private readonly client: Sandkeep) {}

  /** What is in the trash. */
  list(): Promise<types.TrashItem[]> {
    return this.client.transport.all("list_trash");
  }

  /** Restores a sandbox, by its name or id. */
  async restore(sandbox: string, options: types.Restore = {}): Promise<Sandbox> {
    const restored = await this.client.transport.call("restore_sandbox", { path: { sandbox }, json: options });
    return new Sandbox(this.client, restored.name, restored);
  }

  /** Empties the trash. */
  empty(): Promise<types.TrashEmptied> {
    return this.client.transport.call("empty_trash");
  }
}

/** What of the audit log is meant. */
export interface AuditFilter {
  since?: string;
  actor?: string;
  target?: string;
  action?: string;
  /** The operator's log; needs an admin key. */
  host?: boolean;
}

/** The log of who did what. */
export class Audit {
  constructor(private readonly transport: Transport) {}

  /** Entries, oldest first. */
  list(filter: AuditFilter & { until?: string; limit?: number } = {}): AsyncGenerator<types.AuditEntry, void> {
    return this.transport.pages("audit", { query: { ...filter } });
  }

  /** Entries, and new ones as they come. */
  follow(filter: AuditFilter & { signal?: AbortSignal } = {}): EventStream<types.AuditEntry> {
    const { signal, ...rest } = filter;
    return new EventStream<types.AuditEntry>(this.transport, "audit", { ...rest, follow: true }, true, signal);
  }

  /** Whether entries were removed, changed or reordered. */
  verify(options: { host?: boolean; expect?: string } = {}): Promise<types.AuditVerification> {
    return this.transport.call("verify_audit", { query: options, timeout: 0 });
  }
}

let usual: Sandkeep | undefined;

/** The client that `Sandbox` uses if it is given none. */
export function defaultClient(): Sandkeep {
  usual ??= new Sandkeep();
  return usual;
}
