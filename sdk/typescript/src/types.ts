/** What the server is sent and answers. Made by sdk/generate.py. Do not edit. */

/** A page of a list. */
export interface Page<T> {
  /** What is on it. */
  items: T[];
  /** The `cursor` of the next page; absent on the last. */
  next?: string | null;
}

/** What acceptance does with the result of a run. */
export type AcceptRule = "promote" | "merge" | "patch" | "keep";

/** An acceptance. The body may be empty. */
export interface AcceptRun {
  how?: AcceptRule | null;
  /** What there is to say about it. */
  comment?: string;
  /** Whether the sandbox that was made for the run is deleted afterwards. */
  delete_sandbox?: boolean;
}

/** Who may reach a port from outside. */
export type Access = "public" | "private" | "off";

/** A directory of the server to be added to an image. */
export interface AddDirectory {
  /** Its path on the server. */
  from: string;
  /** Its path in the image. */
  to: string;
}

/** An answer to be given. */
export interface AnswerApproval {
  /** The answer. */
  answer: ApprovalAnswer;
  /** What there is to say about it. */
  comment?: string;
}

/** An approval. */
export interface Approval {
  /** Its id. */
  id: string;
  /** The project it belongs to. */
  project: string;
  /** The sandbox it is about. */
  sandbox: string;
  /** The run it belongs to. */
  run?: string | null;
  /** Who asks. */
  source: ApprovalSource;
  /** What is held. */
  subject: ApprovalSubject;
  /** What the answer decides, if it is more than one request: the host, the secret and the host, or the limit. */
  target?: string | null;
  /** The question. */
  question: string;
  /** What there is to know before answering. */
  context: string;
  /** Its status. */
  status: ApprovalStatus;
  default?: ApprovalAnswer | null;
  /** The id of the key that asked, if one did. */
  asked_by?: string | null;
  /** When it was asked. */
  asked_at: string;
  /** When it expires. */
  expires_at: string;
  /** Who answered: the id of a key, or `webhook:` and the id of the webhook whose receiver did. */
  answered_by?: string | null;
  /** When it was answered, or expired. */
  answered_at?: string | null;
  /** What was said about it. */
  comment: string;
}

/** An answer. */
export type ApprovalAnswer = "approve" | "deny";

/** What somebody has to approve in a sandbox. While a sandbox has this setting, programs inside can also ask with `keep ask`. Only a key that may approve can change or remove it. */
export interface ApprovalPolicy {
  /** Commands that are held: patterns with `*` and `?` for the whole command line. They apply to commands started through the API, not to what those start. */
  commands?: string[];
  /** Whether the first contact with each host is held. An approved host stays approved for the sandbox. */
  hosts?: boolean;
  /** Hosts that need no approval: names, `*.example.com`, or addresses. */
  known_hosts?: string[];
  /** Secrets whose use is held: the first request that has it to each host, and each command that is given it. */
  secrets?: string[];
  expires?: Span | null;
  default?: ApprovalAnswer | null;
}

/** Who asks. */
export type ApprovalSource = "harness" | "agent" | "policy";

/** The status of an approval. */
export type ApprovalStatus = "pending" | "approved" | "denied" | "expired";

/** What is held until there is an answer. */
export type ApprovalSubject = "question" | "command" | "host" | "secret" | "spending" | "validation";

/** A question to be asked. */
export interface AskApproval {
  /** The question, on one line. */
  question: string;
  /** What there is to know before answering. */
  context?: string;
  expires?: Span | null;
  default?: ApprovalAnswer | null;
}

/** A session that writes to a drive. */
export interface Attached {
  /** The sandbox's name. */
  sandbox: string;
  /** The session's id. */
  session: string;
}

/** Whose clients a token is for. */
export type Audience = "vercel";

/** An entry of the audit log. Its hash covers the entry as it is in the file (`docs/formats/audit.md`). */
export interface AuditEntry {
  /** Its number in its chain. */
  seq: number;
  /** When it happened. */
  at: string;
  /** What was done: `sandbox.create`. `docs/AUDIT.md` has the table. */
  action: string;
  /** Who did it: `key`, `system`, `agent` (a process in a sandbox) or `anonymous` (a caller without a valid key). */
  actor: string;
  /** The id of the key. */
  key?: string | null;
  /** The key's label. */
  label?: string | null;
  /** By which way: `api`, `vercel`, `gateway`, `socket` or `engine`. */
  front: string;
  /** The caller's address. */
  address?: string | null;
  /** The project it was done in. */
  project?: string | null;
  /** What it was done to: `sandbox/my-app`. */
  target?: string | null;
  /** How it ended: `done`, `denied` or `failed`. */
  outcome: string;
  /** The HTTP status of the response. */
  status?: number | null;
  /** The error code of the response. */
  code?: string | null;
  /** Further facts. */
  detail?: Record<string, string>;
  /** The hash of the entry before it. */
  prev: string;
  /** Its own hash. */
  hash: string;
}

/** What verification found in a chain of the audit log. */
export interface AuditVerification {
  /** The chain: `host`, or `project/` and a name. */
  chain: string;
  /** Whether nothing is missing and nothing was changed. */
  intact: boolean;
  /** How many entries there are. */
  entries: number;
  /** The number of the first one: those before were removed because the log reached its limit. */
  first: number;
  /** The number of the last one. */
  last: number;
  /** The hash of the last one. Keep number and hash elsewhere, and give them as `expect` later. */
  last_hash: string;
  /** The number of the last entry that the head was signed for. */
  signed: number;
  /** What is wrong; the first 100. */
  findings: string[];
  /** How much is wrong. */
  found: number;
}

/** Why a command is named. */
export type Because = "given" | "running" | "given_and_running";

/** How a fork's work was brought back. */
export type BroughtBack = "promoted" | "merged";

/** One line of the answer to a build. */
export type BuildProgress = {
  /** Which, counted from 1. */
  number: number;
  /** How many there are. */
  total: number;
  /** Its line in the Dockerfile. */
  line: number;
  /** The instruction. */
  text: string;
  /** Whether its result was in the cache. */
  cached: boolean;
  type: "step";
} | {
  /** What: text, or the replacement character for what is none. */
  text: string;
  type: "output";
} | {
  /** What is being done, for people; also what tells several bars apart. */
  what: string;
  /** How much is done: bytes, or files where `total` is absent. */
  done: number;
  /** How much there is, where that is known. */
  total?: number | null;
  type: "progress";
} | {
  /** What. */
  text: string;
  type: "warning";
} | {
  /** The image. */
  image: Image;
  type: "done";
} | {
  /** Why. */
  error: ErrorBody;
  type: "error";
};

/** A cancellation. The body may be empty. */
export interface CancelRun {
  /** Why, for people. */
  comment?: string;
}

/** A path that changed. */
export interface ChangedPath {
  /** The path, from the root of the sandbox. */
  path: string;
  /** What happened to it. */
  change: PathChange;
  /** Whether it is a directory. */
  dir?: boolean;
  /** What it takes on the disk; 0 if it was deleted. */
  bytes?: number;
}

/** How a check came out. */
export type CheckState = "ok" | "warning";

/** A checkpoint. The body may be empty. */
export interface Checkpoint {
  /** A label, for people. */
  label?: string | null;
}

/** The lifetime class of a sandbox. */
export type Class = "ephemeral" | "resumable" | "workspace";

/** One process started in a session. */
export interface Command {
  /** Its id. */
  id: string;
  /** The sandbox's id. */
  sandbox_id: string;
  /** The session it ran in. */
  session: string;
  /** Program and arguments. */
  argv: string[];
  /** Its working directory. */
  cwd?: string | null;
  /** The user it ran as. */
  user?: string | null;
  /** Names of the variables it was given; values are not kept. */
  env_names: string[];
  /** Whether it has a terminal. */
  tty: boolean;
  /** Whether it goes on when the caller leaves. */
  detached: boolean;
  /** Its state. */
  state: CommandState;
  /** Its exit code; 128 + signal when a signal ended it. */
  exit_code?: number | null;
  end?: CommandEnd | null;
  /** The limit that ended it: bytes with `out_of_memory` and `out_of_disk`, milliseconds with `timed_out`. */
  limit?: number | null;
  /** The most that was used of that limit, if known: bytes. */
  peak?: number | null;
  /** When it began. */
  started_at: string;
  /** When it ended. */
  ended_at?: string | null;
  /** How much it printed. */
  output_bytes: number;
  /** Whether the log has less than it printed. */
  truncated: boolean;
  /** The service it is of. */
  service?: string | null;
  /** Who started it: the id of an API key, or `service`, `hook`. */
  by?: string | null;
  changes?: CommandChanges | null;
}

/** What a command changed, path by path. */
export interface CommandChangeList {
  /** The command's id. */
  command: string;
  changes?: CommandChanges | null;
  /** Paths, sorted; at most 1,000. Bytes that are not printable UTF-8, and `%`, are written `%XX`. */
  paths: ChangedPath[];
  /** Directories in which more paths changed than are listed. */
  more: MoreChanges[];
}

/** What a command changed in the root filesystem of its sandbox. Drives, and what is mounted in memory, do not count. */
export interface CommandChanges {
  /** How many paths it created. */
  created: number;
  /** How many paths it modified: content, mode, owner or times. */
  modified: number;
  /** How many paths it deleted. */
  deleted: number;
  /** What the created and modified files take on the disk. */
  bytes: number;
  /** Whether it was this command alone. Otherwise something else ran at the same time, and these are the changes of all together. */
  exact: boolean;
  /** Whether all changes were seen. Not if there are very many files, or if the server was restarted meanwhile. */
  complete: boolean;
  /** Commands that ran at the same time: their ids, the first 16. */
  with?: string[];
}

/** Why a command ended. */
export type CommandEnd = "exited" | "signalled" | "timed_out" | "out_of_memory" | "out_of_disk" | "host_disk_full" | "killed" | "session_ended" | "lost";

/** The state of a command. */
export type CommandState = "running" | "exited" | "lost";

/** The disk usage of a sandbox's command records and logs. */
export interface CommandsKept {
  /** How many are on record. */
  count: number;
  /** The disk space that records and logs take. */
  bytes: number;
}

/** A network connection of a sandbox, allowed or refused. */
export interface Connection {
  /** The session it was in. */
  session: string;
  /** A number that grows within the session. */
  id: number;
  /** When it began. */
  at: string;
  /** When it ended; null while it is open. */
  ended_at?: string | null;
  /** How long it lasted, or has lasted. */
  duration_ms: number;
  /** What it was. */
  protocol: Protocol;
  /** The address and port the sandbox asked for; null for a lookup. */
  to?: string | null;
  /** The host name, if known. */
  name?: string | null;
  /** What was decided, or how it went. */
  verdict: Verdict;
  /** The rule it follows from. */
  rule: string;
  /** Bytes received from outside. */
  bytes_in: number;
  /** Bytes sent outside. */
  bytes_out: number;
  /** More details: a request and its status, or why the destination was not reached. */
  detail?: string | null;
}

/** A drive to create, or to get. */
export interface CreateDrive {
  /** Its name: 1 to 64 letters, digits, `-` and `_`. */
  name: string;
  max_size?: Size | null;
  /** The action if the name is taken. A drive of another size is never returned. */
  if_exists?: IfExists;
}

/** A key to create. */
export interface CreateKey {
  /** A label, for people. */
  label?: string;
  /** What it may do. */
  scope: Scope;
  /** Whether it may approve, and accept runs; an admin key may anyway. */
  approve?: boolean;
  expires?: Span | null;
}

/** A project to create. */
export interface CreateProject {
  /** Its name. */
  name: string;
}

/** A sandbox to create, or to get. */
export interface CreateSandbox {
  /** The name; generated if absent. */
  name?: string | null;
  /** The action if the name is taken. */
  if_exists?: IfExists;
  /** Whether to start it immediately, which is the default; otherwise it starts on the first call that needs it. */
  start?: boolean | null;
  /** A snapshot to start from, instead of an image. */
  from?: string | null;
  /** The image to start from if there is no snapshot: `host`, a name, or a registry reference. */
  image?: string | null;
  /** The isolation backend: `container` or `microvm`. Changed from the next session on; a sandbox that is paused has to be stopped first. */
  driver?: string | null;
  class?: Class | null;
  /** Whether a stop makes a snapshot. */
  persistent?: boolean | null;
  /** The owner, for people. */
  owner?: string | null;
  /** The purpose, for people. */
  purpose?: string | null;
  expires?: Span | null;
  /** Tags to filter by; replaces the list. */
  tags?: Record<string, string> | null;
  /** Environment of every command; replaces all variables. */
  env?: Record<string, string> | null;
  /** Working directory of every command; null for the image's. */
  cwd?: string | null;
  /** User of every command; null for the image's. */
  user?: string | null;
  /** CPUs, fractions allowed. */
  vcpus?: number | null;
  memory?: Size | null;
  /** Processes and threads. */
  pids?: number | null;
  disk?: Size | null;
  session_timeout?: Span | null;
  idle_timeout?: Span | null;
  on_idle?: OnIdle | null;
  hooks?: Hooks | null;
  snapshot_expires?: Span | null;
  /** How many snapshots are kept, the current one included; null to keep all. */
  keep_last?: number | null;
  /** Paths to leave out of snapshots, as globs from the root: `tmp/**`. */
  exclude?: string[] | null;
  /** Drives by the path they are mounted at, from the next session on: at most four; replaces all there were. A fork has none but these. */
  mounts?: Record<string, Mount> | null;
  network?: Network | null;
  /** Secrets that its commands have a placeholder of, which the network puts in its place; replaces all there were. */
  secrets?: SecretUse[] | null;
  /** Published ports; replaces the list. */
  ports?: Port[] | null;
  /** Whether requests to published ports wake the sandbox, unless the port disables it. */
  wake_on_request?: boolean | null;
  /** Services: commands that run in every session; replaces the list. */
  services?: Service[] | null;
  guard?: SetGuard | null;
  approvals?: ApprovalPolicy | null;
}

/** A webhook to create. */
export interface CreateWebhook {
  /** Where events are sent: `https://…`, or `http://…`. */
  url: string;
  /** Which events: kinds (`sandbox.stopped`), groups (`sandbox.*`), or `*` for all. */
  events: string[];
  /** What deliveries are signed with, 16 to 256 bytes; made up if absent. */
  secret?: string | null;
  /** Whether private, loopback and link-local addresses may be dialled; needs an admin key. */
  allow_private?: boolean;
  /** Whether the receiver may answer approvals: `approval.asked` then has a link, `answer_url`, that answers once without a key. Needs a key that may approve, and an address with `https://`, unless private addresses are allowed. */
  answers?: boolean;
}

/** An image to customize: a default user, a home and `sudo` are added. */
export interface CustomizeRequest {
  /** Name of the new image. */
  name: string;
  /** The image to start from; `host` if absent. */
  from?: string | null;
  /** Directories of the server to add. */
  add?: AddDirectory[];
  /** Additional environment variables of commands. */
  env?: Record<string, string>;
  /** Directories to prepend to `PATH`. */
  path?: string[];
}

/** One thing that is wrong with stored data. */
export interface Damage {
  /** What is wrong: `unreadable_manifest`, `missing`, `sync_failed`, `layer_in_doubt`, `layer_changed`, `collection_stopped`, `clock_jumped`, `index_rebuilt` or `security_config`. */
  kind: string;
  /** What it is wrong with: a path below the data directory, or an id. */
  subject: string;
  /** What was found. */
  detail: string;
  /** What it means, and what to do. */
  consequence: string;
  /** When it was first found. */
  since: string;
}

/** The answer to a delete. */
export interface Deleted {
  /** Snapshots that stay because others stand on them. */
  snapshots_kept: string[];
  /** Drives of which what its last session wrote is lost, because the delete was forced. */
  drives_lost?: string[];
}

/** All that went to one place. */
export interface Destination {
  /** The host name, or the address if no name is known. */
  host: string;
  /** How many connections, those that were refused included. */
  connections: number;
  /** How many of them were refused. */
  denied: number;
  /** Bytes received from there. */
  bytes_in: number;
  /** Bytes sent there. */
  bytes_out: number;
  /** When something last began. */
  last_at: string;
}

/** The differences between two points. */
export interface Diff {
  /** The first point. */
  from: DiffPoint;
  /** The second point. */
  to: DiffPoint;
  /** How many paths differ, listed or not. */
  counts: DiffCounts;
  /** The paths, sorted. */
  changes: DiffEntry[];
  /** Whether there are more than are listed. */
  truncated: boolean;
}

/** What of a path differs. */
export type DiffAspect = "content" | "mode" | "owner" | "xattrs" | "type";

/** How many paths differ. */
export interface DiffCounts {
  /** Paths that only the second point has. */
  added: number;
  /** Paths that only the first point has. */
  removed: number;
  /** Paths that both have and that differ. */
  modified: number;
  /** Files that have another path. */
  renamed: number;
  /** Sizes of added and modified files at the second point. */
  bytes: number;
}

/** One path that differs. */
export interface DiffEntry {
  /** The path. Bytes that are not printable UTF-8, and `%`, are written `%XX`. */
  path: string;
  /** How it differs. */
  change: DiffKind;
  /** Of a renamed file: its path at the first point. */
  old_path?: string | null;
  /** Of a modified or renamed path: what differs. */
  what?: DiffAspect[];
  from?: DiffSide | null;
  to?: DiffSide | null;
}

/** How a path differs. */
export type DiffKind = "added" | "removed" | "modified" | "renamed";

/** A point as it was found. */
export interface DiffPoint {
  /** As it was asked for. */
  point: string;
  /** The snapshot; absent for an image, and for a running sandbox, whose files are read as they are. */
  snapshot?: string | null;
  /** Whether it runs, so that files may change during the comparison. */
  live?: boolean;
}

/** What a point has at a path. */
export interface DiffSide {
  /** What it is. */
  kind: EntryKind;
  /** Permission bits, set-user-id and its like included. */
  mode: number;
  /** Owner, as a number inside the sandbox. */
  uid: number;
  /** Group, as a number inside the sandbox. */
  gid: number;
  /** Size in bytes; of a directory 0. */
  size_bytes: number;
}

/** An answer to a request that is never sent. */
export interface DirectAnswer {
  /** 200 to 599. */
  status: number;
  /** Headers. */
  headers?: Record<string, string>;
  /** The body. */
  body?: string;
}

/** A volume that outlives sandboxes and is mounted into them. */
export interface Drive {
  /** Its name, unique in the project. */
  name: string;
  /** Its id. */
  id: string;
  /** The project it belongs to. */
  project: string;
  /** Its maximum size. */
  max_size_bytes: number;
  /** What it takes on the disk, what it shares with its forks included. What a session under way writes is counted when that ends. */
  size_bytes: number;
  /** Whether something was ever written to it, so that it can be mounted as a snapshot, or forked. */
  initialized: boolean;
  /** How often what it holds was changed: by a session that wrote to it, or by a promotion. */
  generation?: number;
  attached?: Attached | null;
  /** The id of the drive it was forked from. */
  parent?: string | null;
  /** When it was made. */
  created_at: string;
  /** When it was last changed, attached or detached. */
  updated_at: string;
}

/** The encoding of `data`. */
export type Encoding = "utf8" | "base64";

/** What is at a path. */
export interface Entry {
  /** The name (in a listing) or the path that was asked about. Bytes that are not UTF-8 are shown as U+FFFD here and exactly in `raw_name`. */
  name: string;
  /** The exact name, base64, where `name` could not say it. */
  raw_name?: string | null;
  /** What it is. */
  kind: EntryKind;
  /** Size in bytes. */
  size_bytes: number;
  /** Permission bits, set-user-id and its like included. */
  mode: number;
  /** Owner, as a number inside the sandbox. */
  uid: number;
  /** Group, as a number inside the sandbox. */
  gid: number;
  /** Last modification. */
  modified_at: string;
  /** Where a symlink points. */
  target?: string | null;
}

/** What an `Entry` is. */
export type EntryKind = "file" | "directory" | "symlink" | "other";

/** The body of every response that is not a success. */
export interface ErrorAnswer {
  /** What went wrong. */
  error: ErrorBody;
}

/** What went wrong. */
export interface ErrorBody {
  /** What kind it is, for programs: `not_found`, `name_taken`, `invalid`. `docs/API.md` lists them. */
  code: string;
  /** Former names of the code. They are removed one release after the code was renamed. */
  aliases?: string[];
  /** What happened, for people. */
  message: string;
  /** What to do about it. */
  hint?: string | null;
  /** What the guard found, when that is why (`secret_found`, `decision_needed`). */
  findings?: Finding[];
  /** Paths that cannot be merged, when that is why (`merge_conflicts`); at most 1,000. */
  conflicts?: MergeConflict[];
  /** The id of the request, as in `X-Request-Id` and in the server's log. */
  request_id?: string | null;
}

/** Something that happened. `docs/API.md` has the table of kinds and what their `data` holds. */
export interface Event {
  /** Its position in the feed: give it as `cursor` or `Last-Event-ID` to continue after it. */
  id: string;
  /** When it happened. */
  at: string;
  /** What happened: `sandbox.running`, `command.ended`, ...; `stream.*` is about the stream itself. */
  kind: string;
  /** The project it happened in; absent for what concerns the host or the stream. */
  project?: string | null;
  sandbox?: EventSandbox | null;
  /** Details, by kind. */
  data?: Record<string, unknown>;
}

/** A sandbox as it was at the time of an event. */
export interface EventSandbox {
  /** Its id. */
  id: string;
  /** Its name. */
  name: string;
  /** Its tags. */
  tags?: Record<string, string>;
}

/** What `POST …/exec` answers as one JSON document: with `?wait=true` the result, with `detach` the command. */
export type ExecAnswer = ExecResult | Command;

/** One line of the stream of a command. */
export type ExecEvent = {
  /** The command. */
  command: Command;
  /** The session, with what its hooks did if this call woke the sandbox. */
  session: Session;
  /** Whether this call woke the sandbox. */
  resumed: boolean;
  type: "started";
} | {
  /** The encoding of `data`. */
  encoding: Encoding;
  /** The bytes. */
  data: string;
  /** When it was printed; only in logs, with `times`. */
  at?: string | null;
  type: "stdout";
} | {
  /** The encoding of `data`. */
  encoding: Encoding;
  /** The bytes. */
  data: string;
  /** When it was printed; only in logs, with `times`. */
  at?: string | null;
  type: "stderr";
} | {
  /** How many. */
  bytes: number;
  type: "gap";
} | {
  /** Its exit code; absent if its session ended under it. */
  exit_code?: number | null;
  /** The command. */
  command: Command;
  type: "exited";
} | {
  type: "more";
} | {
  /** What. */
  error: ErrorBody;
  type: "error";
};

/** A command to run. */
export interface ExecRequest {
  /** Program and arguments. */
  argv: string[];
  /** Variables on top of the sandbox's. */
  env?: Record<string, string>;
  /** Working directory; the sandbox's if absent. */
  cwd?: string | null;
  /** User; the sandbox's if absent. */
  user?: string | null;
  tty?: TermSize | null;
  /** Whether standard input will be sent: over the WebSocket, or by `POST …/commands/{id}/stdin`. Otherwise it is empty, or what `input` says. */
  stdin?: boolean;
  /** Standard input, whole, as text. */
  input?: string | null;
  /** Standard input, whole, as base64. */
  input_base64?: string | null;
  /** Answer at once with the `Command` and let it go on by itself. */
  detach?: boolean;
  timeout?: Span | null;
  /** Refuse with 409 `not_running` instead of waking the sandbox. */
  if_running?: boolean;
  /** Secrets it is given. */
  inject?: Inject[];
}

/** A command that has ended and what it printed, as one document: the answer to `POST …/exec?wait=true`. */
export interface ExecResult {
  /** The command. */
  command: Command;
  /** Whether this call woke the sandbox. */
  resumed: boolean;
  /** Its exit code; 128 + signal when a signal ended it. Absent if its session ended under it. */
  exit_code?: number | null;
  end?: CommandEnd | null;
  /** Standard output, or that of the terminal, as text. Bytes that are not UTF-8 are replaced by `\\u{fffd}`. */
  stdout: string;
  /** The same bytes as base64, if they are not UTF-8. */
  stdout_base64?: string | null;
  /** How much it printed to standard output, as far as that was kept. */
  stdout_bytes: number;
  /** Whether `stdout` is only the beginning. Its log has more. */
  stdout_truncated: boolean;
  /** Standard error as text. Bytes that are not UTF-8 are replaced by `\\u{fffd}`. */
  stderr: string;
  /** The same bytes as base64, if they are not UTF-8. */
  stderr_base64?: string | null;
  /** How much it printed to standard error, as far as that was kept. */
  stderr_bytes: number;
  /** Whether `stderr` is only the beginning. Its log has more. */
  stderr_truncated: boolean;
  /** Bytes that it printed to either and that were not kept, because the log is bounded. */
  missing_bytes: number;
}

/** An extension of the current session. */
export interface Extend {
  /** How much more. */
  by: Span;
}

/** Something the guard found. Never holds a secret's value. */
export interface Finding {
  /** What it is. */
  kind: FindingKind;
  /** The file, as the sandbox sees it; a value in a name is masked. */
  path: string;
  /** How large it is; of a directory, all that is in it. */
  size_bytes: number;
  /** The secret's name. */
  secret?: string | null;
  place?: FindingPlace | null;
  encoding?: ValueEncoding | null;
  /** How far into the contents, or into the archive's member. */
  offset?: number | null;
  /** The archive's member, the attribute, or why it was not searched. */
  detail?: string | null;
  /** Commands that may have done it, the likeliest first. */
  commands?: Suspect[];
}

/** What a finding is. */
export type FindingKind = "secret" | "large" | "junk" | "core_dump" | "unsearched" | "doubtful";

/** Where in a file a value is. */
export type FindingPlace = "contents" | "name" | "link" | "attribute" | "member";

/** The end of the work of a harness. */
export interface FinishRun {
  /** Why the work failed; absent if it is ready for review. */
  failure?: string | null;
  /** What the run has cost, in the harness's own unit. */
  cost?: number | null;
}

/** A fork: a new sandbox on the same files, and of a machine that keeps memory and is awake or paused, with the same memory and processes. Absent settings are the source's. */
export interface Fork {
  /** The name of the new sandbox; generated if absent. */
  name?: string | null;
  /** How many, all from one snapshot: `name-1`, `name-2` and so on. The answer is a list then. */
  count?: number | null;
  /** A snapshot of the source; its present state if absent. */
  from?: string | null;
  /** Fail with 412 unless the source is at this generation. */
  expect_generation?: number | null;
  /** Whether to start the fork immediately. */
  start?: boolean;
  /** What becomes of the fork once it is accepted: promoted, or all of it merged. */
  on_accept?: OnAccept;
  /** The image to start from if there is no snapshot: `host`, a name, or a registry reference. */
  image?: string | null;
  /** The isolation backend: `container` or `microvm`. Changed from the next session on; a sandbox that is paused has to be stopped first. */
  driver?: string | null;
  class?: Class | null;
  /** Whether a stop makes a snapshot. */
  persistent?: boolean | null;
  /** The owner, for people. */
  owner?: string | null;
  /** The purpose, for people. */
  purpose?: string | null;
  expires?: Span | null;
  /** Tags to filter by; replaces the list. */
  tags?: Record<string, string> | null;
  /** Environment of every command; replaces all variables. */
  env?: Record<string, string> | null;
  /** Working directory of every command; null for the image's. */
  cwd?: string | null;
  /** User of every command; null for the image's. */
  user?: string | null;
  /** CPUs, fractions allowed. */
  vcpus?: number | null;
  memory?: Size | null;
  /** Processes and threads. */
  pids?: number | null;
  disk?: Size | null;
  session_timeout?: Span | null;
  idle_timeout?: Span | null;
  on_idle?: OnIdle | null;
  hooks?: Hooks | null;
  snapshot_expires?: Span | null;
  /** How many snapshots are kept, the current one included; null to keep all. */
  keep_last?: number | null;
  /** Paths to leave out of snapshots, as globs from the root: `tmp/**`. */
  exclude?: string[] | null;
  /** Drives by the path they are mounted at, from the next session on: at most four; replaces all there were. A fork has none but these. */
  mounts?: Record<string, Mount> | null;
  network?: Network | null;
  /** Secrets that its commands have a placeholder of, which the network puts in its place; replaces all there were. */
  secrets?: SecretUse[] | null;
  /** Published ports; replaces the list. */
  ports?: Port[] | null;
  /** Whether requests to published ports wake the sandbox, unless the port disables it. */
  wake_on_request?: boolean | null;
  /** Services: commands that run in every session; replaces the list. */
  services?: Service[] | null;
  guard?: SetGuard | null;
  approvals?: ApprovalPolicy | null;
}

/** A fork: a new drive that holds what another one held when it was last detached. */
export interface ForkDrive {
  /** The new drive's name. */
  name: string;
}

/** A fork that was not made. */
export interface ForkFailed {
  /** What it was to be called. */
  name: string;
  /** What kind of failure, as in errors. */
  code: string;
  /** Former names of the code, as in errors. */
  aliases?: string[];
  /** Why not, for people. */
  reason: string;
}

/** What has become of a fork. */
export type ForkFate = "alive" | "promoted" | "merged" | "rejected" | "expired";

/** What became of a fork's work. */
export interface ForkOutcome {
  /** How it was brought back. */
  how: BroughtBack;
  /** The sandbox it was brought back into. */
  into: string;
  /** That sandbox's generation with it. */
  generation: number;
  /** When. */
  at: string;
}

/** The answer to a fork. */
export type Forked = Forks | Opened;

/** Forks from one snapshot. */
export interface Forks {
  /** Those that are there, in the order of their numbers. */
  made: Opened[];
  /** Those that are not, and why. */
  failed: ForkFailed[];
}

/** Another place for a request. */
export interface Forward {
  /** An `http` or `https` URL. */
  url: string;
  /** How the headers begin that tell where it was meant to go; `x-forwarded-` if absent. */
  prefix?: string | null;
}

/** What a check of the data directory found. */
export interface Fsck {
  /** Whether something that was acknowledged is damaged. */
  broken: boolean;
  /** What was found. */
  problems: FsckProblem[];
}

/** One thing that a check found. */
export interface FsckProblem {
  /** Whether it is merely in the way, and nothing that was acknowledged is damaged. */
  leftover: boolean;
  /** What it is, as a sentence. */
  text: string;
}

/** A check of the data directory. */
export interface FsckRequest {
  /** Whether to read every file of every layer, too. */
  verify?: boolean;
}

/** A sandbox's guard. */
export interface Guard {
  /** When a file holds a secret the session was given. */
  secrets: OnSecret;
  /** When a file is large or junk. */
  junk: OnJunk;
  /** From what size on a file is large. */
  large_bytes: number;
  /** What is junk. */
  globs: string[];
}

/** The server is up. */
export interface Health {
  /** `ok`. */
  status: string;
  /** The server's version. */
  version: string;
  /** How many sandboxes it still has to recover after a restart. Requests for those wait; all others are served. */
  recovering?: number;
}

/** A command that the server runs when a sandbox is created, resumed or stopped. */
export interface Hook {
  /** Program and arguments. */
  argv: string[];
  timeout?: Span | null;
}

/** What a hook did. */
export interface HookRun {
  /** `on_create`, `on_resume` or `validate`. */
  hook: string;
  /** What was run. */
  argv: string[];
  /** The command, whose log can be read; absent if it could not be started. */
  command?: string | null;
  /** Its exit code; absent if it could not be started. */
  exit_code?: number | null;
  /** What went wrong, for people. */
  problem?: string | null;
}

/** The hooks of a sandbox. */
export interface Hooks {
  /** Run in order once, after creation. The first failure ends the list. */
  on_create?: Hook[];
  /** Run in order at every resume. Failures are reported; the resume continues. */
  on_resume?: Hook[];
  validate?: Hook | null;
  /** The absolute path of a Git repository. Its commit and its changed files are compared in the same way. Needs `git` and `sh` inside. */
  validate_git?: string | null;
}

/** The action if the name is taken. */
export type IfExists = "fail" | "get";

/** What a sandbox can start from. */
export interface Image {
  /** What it is called: `host`, `debian:12`, a name given at import. */
  name: string;
  /** SHA-256 of its manifest or archive, as `sha256:…`. */
  digest: string;
  /** How many layers it has. */
  layers: number;
  /** Disk space they take. */
  size_bytes: number;
  /** Disk space of files that they share with the host by hard links; not part of `size_bytes`. */
  host_bytes?: number;
  /** The user of commands. */
  user?: string | null;
  /** The working directory of commands. */
  cwd?: string | null;
  /** The environment of commands. */
  env: Record<string, string>;
  /** The program, for those who ask: sandboxes run what their callers say. */
  entrypoint?: string[];
  /** Its arguments, or the whole command. */
  cmd?: string[];
  /** Labels. */
  labels?: Record<string, string>;
  /** Ports that its programs listen on, like `80/tcp`. */
  exposed_ports?: string[];
  /** Where it came from: `host`, a path, a registry reference, the image it was customized from. */
  source: string;
  /** Whether it was made by customizing another image. */
  customized?: boolean;
  /** The former name of `customized`. It goes with the next release. */
  dressed?: boolean;
  /** When it was made here. */
  created_at: string;
}

/** One line of the answer to a pull, an import or a customization. */
export type ImageProgress = {
  /** What is being done, for people; also what tells several bars apart. */
  what: string;
  /** How much is done: bytes, or files where `total` is absent. */
  done: number;
  /** How much there is, where that is known. */
  total?: number | null;
  type: "progress";
} | {
  /** The image. */
  image: Image;
  type: "done";
} | {
  /** Why. */
  error: ErrorBody;
  type: "error";
};

/** An archive on the server's own disk to import: a root tarball, an OCI layout or a docker archive. */
export interface ImportRequest {
  /** Its path on the server. */
  path: string;
  /** What to call the image. */
  name: string;
}

/** A secret that one command is given: in a variable, or in a file. */
export interface Inject {
  /** The secret. */
  secret: string;
  /** The variable; named like the secret if there is no `file` either. */
  env?: string | null;
  /** A file below `/run` or `/dev/shm`, which are in memory. It is gone when the command ends. */
  file?: string | null;
}

/** A token to make for a private port. */
export interface IssuePortToken {
  expires?: Span | null;
}

/** A token to be made from the key that asks. It ends with the key, or sooner. */
export interface IssueToken {
  /** Whose clients it is for; their claims are in it. */
  for: Audience;
  scope?: Scope | null;
  expires?: Span | null;
}

/** An API key, without its secret. */
export interface Key {
  /** Its id, which is no secret. */
  id: string;
  /** A label, for people. */
  label: string;
  /** What it may do. */
  scope: Scope;
  /** Whether it may approve, and accept runs; an admin key may anyway. */
  approve?: boolean;
  /** When it was made. */
  created_at: string;
  /** When it stops working. */
  expires_at?: string | null;
}

/** Where a fork came from. */
export interface Lineage {
  /** The source's id. */
  sandbox_id: string;
  /** The source's name at the time. */
  name: string;
  /** The snapshot; absent when the source had none and both stand on the image. */
  snapshot?: string | null;
  /** The source's generation. */
  generation: number;
  /** The forks that were made together with it, by the name they begin with. */
  group?: string | null;
  /** What becomes of the fork once it is accepted. */
  on_accept?: OnAccept;
}

/** What a directory holds, sorted by name. */
export interface Listing {
  /** What is in it. */
  items: Entry[];
  /** Pass this as `cursor` for the rest; null if this is all. */
  next?: string | null;
}

/** What a session uses at this moment, and its limits. */
export interface LiveUsage {
  /** CPU time used since the session began. Two readings tell the load. */
  cpu_ms: number;
  /** How many CPUs it may use, in thousandths. */
  cpu_limit_millis: number;
  /** Memory in use now, page cache included; for a microVM what its hypervisor takes on the host. */
  memory_bytes: number;
  /** The most memory at one time. */
  memory_peak_bytes: number;
  /** How much it may use. */
  memory_limit_bytes: number;
  /** Processes and threads; absent for a microVM, where only its own kernel knows. */
  processes?: number | null;
  /** How many it may have. */
  processes_limit: number;
  /** Bytes received from outside since the session began. */
  network_in_bytes: number;
  /** Bytes sent outside since the session began. */
  network_out_bytes: number;
  /** Disk space that the session has written so far; absent if that takes too long to find out. */
  disk_bytes?: number | null;
  /** How much it may write. */
  disk_limit_bytes: number;
  /** Commands that run now. */
  commands: number;
  /** How long the session lasts so far. */
  wall_ms: number;
}

/** A directory to make. */
export interface MakeDir {
  /** Where. */
  path: string;
  /** Permission bits. */
  mode?: number | null;
  /** Whether missing parents are made, and an existing directory is fine. */
  parents?: boolean;
  /** As whom; the sandbox's user if absent. */
  user?: string | null;
}

/** Brings the changes of a sandbox into another one. */
export interface Merge {
  /** The sandbox that gets the changes; the origin if absent. */
  into?: string | null;
  /** Says what would be done, and does nothing. */
  dry_run?: boolean;
  /** What to do with conflicts. */
  conflicts?: OnConflict;
  /** Globs of the paths to take; all if empty. */
  only?: string[];
  /** The generation the target must have. */
  expect_generation?: number | null;
}

/** A path that cannot be merged. */
export interface MergeConflict {
  /** The path. */
  path: string;
  /** Why, as a sentence. */
  reason: string;
}

/** How many paths a merge changes. */
export interface MergeCounts {
  /** Added. */
  added: number;
  /** Removed. */
  removed: number;
  /** Replaced by the other side's. */
  modified: number;
  /** Merged by lines. */
  merged: number;
  /** In conflict. */
  conflicts: number;
}

/** What a merge did, or would do. */
export interface Merged {
  /** The sandbox that got the changes. */
  sandbox: string;
  /** Its generation now. */
  generation: number;
  /** The snapshot with the result; absent if nothing was changed. */
  snapshot?: string | null;
  /** How many paths were taken over, and how many of them were merged by lines. */
  counts: MergeCounts;
  /** Paths that changed on both sides; at most 1,000 are listed. */
  conflicts?: MergeConflict[];
  /** Paths that are, or would be, changed; at most 1,000 are listed. */
  changes: DiffEntry[];
  /** Whether there are more changes or conflicts than are listed. */
  truncated: boolean;
  /** The fork, if it was to be deleted once it was accepted and is. */
  deleted?: string[];
  /** The fork, if it was to be deleted and is still there. */
  failed?: ForkFailed[];
}

/** How many more paths changed below a directory. */
export interface MoreChanges {
  /** The directory, with a slash at its end. */
  under: string;
  /** How many are new. */
  created: number;
  /** How many were modified. */
  modified: number;
  /** How many are gone. */
  deleted: number;
}

/** A drive that a sandbox mounts. */
export interface Mount {
  /** The drive's name. */
  drive: string;
  /** How; `read-write` if absent. */
  mode?: MountMode;
}

/** How a drive is mounted. */
export type MountMode = "read-write" | "snapshot";

/** Something to rename. */
export interface Move {
  /** From where. */
  from: string;
  /** To where. */
  to: string;
  /** As whom; the sandbox's user if absent. */
  user?: string | null;
}

/** The answer to an upload. */
export interface Moved {
  /** How many bytes were written. */
  bytes: number;
  /** How many files. */
  files: number;
}

/** What a sandbox may reach. `docs/NETWORK.md` tells what each part means. */
export interface Network {
  /** What holds where nothing else is said. */
  mode: NetworkMode;
  /** Names that may be reached, under `custom`: `example.com`, `*.example.com`, `www.*.com:443,8443`. */
  domains?: string[];
  /** Addresses that may be reached, under `custom`: `10.0.0.0/8`, `192.0.2.7:5432`. */
  allow?: string[];
  /** Addresses that may not be reached, whatever allows them. */
  deny?: string[];
  /** What happens to HTTP requests; the first that matches decides. */
  requests?: RequestRule[];
}

/** What holds where nothing else is said. */
export type NetworkMode = "allow-all" | "deny-all" | "custom";

/** What went over a sandbox's network, by destination. */
export interface NetworkSummary {
  /** Where to, the most bytes first. */
  destinations: Destination[];
  /** How many connections, those that were refused included. */
  connections: number;
  /** How many of them were refused. */
  denied: number;
  /** Bytes received from outside. */
  bytes_in: number;
  /** Bytes sent outside. */
  bytes_out: number;
}

/** A key that was just made. The secret is shown this once. */
export interface NewKey {
  /** The key. */
  key: Key;
  /** What to send as `Authorization: Bearer …`. */
  secret: string;
}

/** A webhook that has a new secret, which is shown this once. */
export interface NewWebhook {
  /** The webhook. */
  webhook: Webhook;
  /** What deliveries are signed with. */
  secret: string;
}

/** What becomes of a fork once it is accepted: promoted, or all of it merged. */
export type OnAccept = "keep" | "delete";

/** What to do with paths that changed on both sides. */
export type OnConflict = "refuse" | "keep";

/** The action after the idle timeout. */
export type OnIdle = "run" | "pause" | "stop";

/** What a large file or junk means when a session ends. */
export type OnJunk = "off" | "warn" | "promote-or-drop";

/** What a secret's value in a file means when a session ends. */
export type OnSecret = "block" | "quarantine" | "warn";

/** The answer to create, start and fork. */
export interface Opened {
  /** The sandbox. */
  sandbox: Sandbox;
  session?: Session | null;
  /** Whether this call created the sandbox. */
  created: boolean;
  /** Whether this call woke it. */
  resumed: boolean;
}

/** Conditions on a key and its value. */
export interface PairMatch {
  key?: TextMatch | null;
  value?: TextMatch | null;
}

/** What happened to a path. */
export type PathChange = "created" | "modified" | "deleted";

/** A pause. The body may be empty. */
export interface Pause {
  /** Fail with 412 unless the sandbox is at this generation. */
  expect_generation?: number | null;
}

/** The answer to a pause. */
export interface Paused {
  /** The sandbox. */
  sandbox: Sandbox;
  session?: Session | null;
  snapshot?: Snapshot | null;
}

/** A published port. */
export interface Port {
  /** Its number. */
  port: number;
  /** Who may reach it. */
  access?: Access;
  /** Whether a request wakes the sandbox and waits for the port to open. */
  wake?: boolean;
}

/** A port and where it is reached. */
export interface PortStatus {
  /** Its number. */
  port: number;
  /** Who may reach it. */
  access: Access;
  /** Whether a request wakes the sandbox. */
  wake: boolean;
  /** Where it is reached: by name where the server has a domain and the names fit, else by path. */
  url: string;
  /** Where it is reached by path, on the server's own address. */
  path_url: string;
  /** The service that is meant to listen there. */
  service?: string | null;
}

/** A token for one port of one sandbox. */
export interface PortToken {
  /** The token: for `Authorization: Bearer`, `X-Sandkeep-Token` or `?keep_token=`. */
  token: string;
  /** The port's address with the token in it. */
  url: string;
  /** When it stops working. It also ends with the key it was made with. */
  expires_at: string;
}

/** A tenant. */
export interface Project {
  /** Its name, which is its identity. */
  name: string;
  /** When it was made. */
  created_at: string;
  /** Who may act for it. */
  keys: Key[];
}

/** The network policies of a project. */
export interface ProjectNetwork {
  /** The policy of sandboxes without their own. */
  default: Network;
  bound?: Network | null;
  /** How many outbound connections and flows the project's sandboxes may have open together. Half of what the server allows all sandboxes, if absent or null. */
  max_connections?: number | null;
}

/** What a project allows its runs. */
export interface ProjectRuns {
  /** How many may run or wait for an approval at the same time. */
  running: number;
  /** How many may be queued. */
  queued: number;
  /** Whether nobody may approve or accept what the same key asked for. */
  separate_approver?: boolean;
}

/** Gives the origin of a fork the fork's state. */
export interface Promote {
  /** The generation the origin must have; that of the fork's beginning if absent. */
  expect_generation?: number | null;
  /** Deletes the fork afterwards. It goes to the trash. */
  delete_fork?: boolean;
  /** Deletes the other forks of its group too: those that were made together with it. */
  delete_group?: boolean;
}

/** Puts chosen files that a sandbox made, changed or deleted since it was forked into a drive that no session writes to. */
export interface PromoteIntoDrive {
  /** The sandbox. */
  from: string;
  /** Globs of the paths. */
  only: string[];
  /** The directory in the drive, below which files keep their whole path; its root if absent. */
  path?: string;
  /** The generation the drive must have. */
  expect_generation?: number | null;
  /** Says what would be done, and does nothing. */
  dry_run?: boolean;
}

/** A fork that was promoted. */
export interface Promoted {
  /** The origin, which is now what the fork is. */
  sandbox: Sandbox;
  /** The snapshot it has now. */
  snapshot: string;
  /** The snapshot it had before, for a rollback; absent if it was its image. */
  before?: string | null;
  /** Forks that were deleted afterwards. */
  deleted?: string[];
  /** Forks that were to be deleted and are still there. */
  failed?: ForkFailed[];
}

/** What was put into a drive, or would be. */
export interface PromotedIntoDrive {
  /** The drive. */
  drive: Drive;
  /** The snapshot of the sandbox that the files are from; absent for its image, and for a running one that was looked at only. */
  snapshot?: string | null;
  /** How many paths were added, replaced and removed. All 0 if the drive had them already. */
  counts: MergeCounts;
  /** Paths where a file and a directory are in each other's place; with `dry_run` only. At most 1,000 are listed. */
  conflicts?: MergeConflict[];
  /** Paths in the drive that are, or would be, changed; at most 1,000 are listed. */
  changes: DiffEntry[];
  /** Whether there are more changes or conflicts than are listed. */
  truncated: boolean;
}

/** What kind of traffic it was. */
export type Protocol = "tcp" | "udp" | "icmp" | "dns" | "http";

/** What was removed from the cache of builds. */
export interface PrunedBuilds {
  /** How many steps. */
  steps: number;
}

/** How a port is to be published. */
export interface PublishPort {
  /** Who may reach it; `off` to publish it no more. */
  access: Access;
  /** Whether a request wakes the sandbox and waits for the port to open. */
  wake?: boolean;
}

/** An image to fetch from a registry. */
export interface PullRequest {
  /** By tag or digest: `debian:12`, `ghcr.io/owner/name@sha256:…`; `host` is made again from the server's own machine. */
  reference: string;
}

/** Files that were taken out of a snapshot, and are kept aside for an operator. */
export interface Quarantine {
  /** The snapshot they are not in. */
  id: string;
  /** The project. */
  project: string;
  /** The name of the sandbox whose session wrote them. */
  sandbox: string;
  /** The drive they were written to; the sandbox's own root if null. */
  drive_id?: string | null;
  /** When. */
  at: string;
  /** The files. */
  files: QuarantinedFile[];
  /** Why. */
  findings: Finding[];
}

/** A quarantined file. */
export interface QuarantinedFile {
  /** Where it was, as the sandbox saw it; a value in a name is masked. */
  path: string;
  /** Where it is, in the server's data directory. */
  kept_at: string;
  /** How large it is. */
  size_bytes: number;
}

/** The server takes work. */
export interface Readiness {
  /** The server's version. */
  version: string;
  /** What was looked at: `recovery`, `disk`, `drivers`, and `tls` if this server speaks it. */
  checks: ReadinessCheck[];
}

/** One thing that was looked at. */
export interface ReadinessCheck {
  /** What. */
  name: string;
  /** How it is. */
  state: CheckState;
  /** What was found; empty for a caller without a key. */
  detail: string;
}

/** A rejection. The body may be empty. A sandbox that was made for the run is deleted. */
export interface RejectRun {
  /** What there is to say about it. */
  comment?: string;
}

/** Gives a sandbox another name. */
export interface Rename {
  /** The new name. */
  name: string;
}

/** What is done with a request. */
export type RequestAction = "allow" | "deny" | {
  /** Answer without sending the request. */
  answer: DirectAnswer;
} | {
  /** Send the request to another URL; its path and query are appended. */
  forward: Forward;
} | {
  /** It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null` leaves the value that a rule for the same domain has. */
  headers: Record<string, string | null>;
};

/** Conditions on a request. All must hold. */
export interface RequestMatch {
  /** One of these methods. */
  methods?: string[];
  path?: TextMatch | null;
  /** For each of these, some parameter of the query. */
  query?: PairMatch[];
  /** For each of these, some header. */
  headers?: PairMatch[];
}

/** What happens to some HTTP requests. */
export interface RequestRule {
  /** Requests to these names. */
  domain: string;
  /** Of those, the ones that look like this; all if absent. */
  match?: RequestMatch;
  /** What is done. */
  action: RequestAction;
}

/** What a sandbox may use. */
export interface Resources {
  /** CPUs. */
  vcpus: number;
  /** Memory, swap included. */
  memory_bytes: number;
  /** Processes and threads. */
  pids: number;
  /** Disk space that a session may write. */
  disk_bytes: number;
}

/** Whether a service that has ended is restarted. */
export type Restart = "never" | "on-failure" | "always";

/** A restore from the trash. */
export interface Restore {
  /** Its name; the one it had if absent. */
  name?: string | null;
}

/** A rollback. */
export interface Rollback {
  /** The snapshot to return to. */
  to: string;
  /** Fail with 412 unless the sandbox is at this generation. */
  expect_generation?: number | null;
}

/** The answer to a rollback. */
export interface RolledBack {
  /** The sandbox. */
  sandbox: Sandbox;
  before?: Snapshot | null;
}

/** Another secret for a webhook. */
export interface RotateWebhookSecret {
  /** The secret; made up if absent. */
  secret?: string | null;
  /** Whether the secret before is forgotten at once. Otherwise deliveries are signed with both. */
  only?: boolean;
}

/** A run. */
export interface Run {
  /** Its id. */
  id: string;
  /** The project it belongs to. */
  project: string;
  /** Its status. */
  status: RunStatus;
  /** Why it failed, was cancelled or expired. */
  why?: string | null;
  /** What was asked for. */
  place: RunPlace;
  command?: RunCommand | null;
  /** The sandbox it works in, once it is known. */
  sandbox?: string | null;
  /** Whether that sandbox was made for the run. */
  own_sandbox: boolean;
  /** The repository, for people. */
  repository: string;
  /** Who answers for it. */
  owner: string;
  /** What it is for. */
  purpose: string;
  /** A kind of work. */
  class: string;
  /** Runs with a higher number start first. */
  priority: number;
  /** Commands that are held until somebody approves. */
  approve: string[];
  /** Whether the first contact with each host is held. */
  approve_hosts: boolean;
  /** Hosts that need no approval. */
  known_hosts: string[];
  /** Secrets whose use is held. */
  approve_secrets: string[];
  /** What the run may use, as it was raised since. */
  spending: RunSpending[];
  /** What acceptance does. */
  on_accept: AcceptRule;
  /** How long the result waits for a review. */
  keep_ms: number;
  /** How long one attempt may work. */
  timeout_ms?: number | null;
  /** How often the command is started again. */
  retries: number;
  /** How long a harness may be silent; absent if the server starts the command. */
  heartbeat_ms?: number | null;
  /** The snapshot it began with; if absent, what its sandbox was made from. */
  first_snapshot?: string | null;
  /** The snapshot that is to be reviewed. */
  last_snapshot?: string | null;
  /** The attempts of the server to run the command. */
  attempts: RunAttempt[];
  /** Approvals that wait for an answer. */
  pending_approvals: string[];
  /** What the harness says it cost, in its own unit. */
  cost?: number | null;
  usage?: Usage | null;
  decision?: RunDecision | null;
  /** The id of the key that started it. */
  by: string;
  /** When it was asked for. */
  queued_at: string;
  /** When it left the queue. */
  started_at?: string | null;
  /** When its work was done, or given up. */
  finished_at?: string | null;
  /** When it got its last status. */
  ended_at?: string | null;
  /** Until when it has to be reviewed. */
  review_by?: string | null;
}

/** A run that was accepted. */
export interface RunAccepted {
  /** The run. */
  run: Run;
  promoted?: Promoted | null;
  /** The first point of the patch: see `GET /v1/diff/patch`. */
  from: string;
  /** The second point of the patch. */
  to: string;
}

/** One attempt of a run. */
export interface RunAttempt {
  /** Its command, in the run's sandbox. */
  command: string;
  /** When it was started. */
  started_at: string;
  /** When it ended. */
  ended_at?: string | null;
  /** The exit code of the command. */
  exit_code?: number | null;
  /** Why it counts as failed. */
  problem?: string | null;
}

/** The command of a run. */
export interface RunCommand {
  /** Program and arguments. */
  argv: string[];
  /** Environment on top of the sandbox's. */
  env?: Record<string, string>;
  /** Working directory; the sandbox's if absent. */
  cwd?: string | null;
  /** User; the sandbox's if absent. */
  user?: string | null;
}

/** A place outside that a run was in contact with. */
export interface RunContact {
  /** The name, or the address where none was told. */
  host: string;
  /** How many connections, refused ones included. */
  connections: number;
  /** How many were refused. */
  denied: number;
  /** Bytes received. */
  bytes_in: number;
  /** Bytes sent. */
  bytes_out: number;
}

/** What was decided about the result of a run. */
export interface RunDecision {
  /** Whether it was accepted. */
  accepted: boolean;
  how?: AcceptRule | null;
  /** The id of the key that decided. */
  by: string;
  /** When. */
  at: string;
  /** What was said about it. */
  comment: string;
}

/** A sign of life of a harness. */
export interface RunHeartbeat {
  /** What the run has cost so far, in the harness's own unit. */
  cost?: number | null;
}

/** The sandbox of a run: an existing one, a fork, or a fresh one. */
export type RunPlace = {
  /** The name of the sandbox. */
  sandbox: string;
  how: "existing";
} | {
  /** The sandbox that is forked. */
  sandbox: string;
  /** The name of the fork; generated if absent. */
  name?: string | null;
  how: "fork";
} | {
  /** The image; the server's default if absent. */
  image?: string | null;
  /** The name of the sandbox; generated if absent. */
  name?: string | null;
  how: "fresh";
};

/** What there is to know about the result of a run. */
export interface RunReview {
  /** The run. */
  run: Run;
  /** The first point of the comparison: what the run began with. */
  from: string;
  /** The second: the snapshot that is reviewed. */
  to: string;
  counts?: DiffCounts | null;
  /** The paths that differ, at most 1,000. */
  changes: DiffEntry[];
  /** Whether there are more. */
  truncated: boolean;
  /** Why files could not be compared. */
  problem?: string | null;
  /** Whether the sandbox is still what was pinned for the review. If not, it has to be pinned again. */
  current: boolean;
  /** Commands of the run that changed something, or of which that is not known; newest first, at most 100. */
  commands: Command[];
  /** What it was in contact with, the most bytes first, at most 100. */
  network: RunContact[];
  /** What the guard found in the snapshot. */
  findings: Finding[];
  /** Approvals of the run. */
  approvals: Approval[];
}

/** A spending limit of a run. */
export interface RunSpending {
  /** What is counted. */
  what: SpendingKind;
  /** How much the run may use now. */
  allowed: number;
  /** How much more each approval allows. */
  step: number;
}

/** The status of a run. */
export type RunStatus = "queued" | "running" | "waiting_for_approval" | "ready_for_review" | "accepted" | "rejected" | "failed" | "cancelled" | "expired";

/** A named, durable machine. */
export interface Sandbox {
  /** Its name, unique in the project. */
  name: string;
  /** Its id. */
  id: string;
  /** The project it belongs to. */
  project: string;
  /** Where it is. */
  state: State;
  /** Why it is in the state `failed`. */
  failure?: string | null;
  /** Why its last session started from files although there was memory. Not in lists. */
  fallback?: string | null;
  /** Whether its last session found it as it was at the stop before; absent without a `validate` hook. Not in lists. */
  valid?: boolean | null;
  commands?: CommandsKept | null;
  /** How many snapshots were acknowledged. */
  generation: number;
  /** What the next session starts from; the image if absent. */
  current_snapshot?: string | null;
  /** When that snapshot was taken. In `GET` of one sandbox and in lists. */
  saved_at?: string | null;
  unsaved?: Unsaved | null;
  session_changes?: SessionChanges | null;
  forked_from?: Lineage | null;
  outcome?: ForkOutcome | null;
  /** The current session, or the last one. */
  session?: string | null;
  /** The image it was created from. */
  image: string;
  /** The isolation backend. */
  driver: string;
  /** The lifetime class. */
  class: Class;
  /** Whether a stop makes a snapshot. */
  persistent: boolean;
  /** The owner, for people. */
  owner: string;
  /** The purpose, for people. */
  purpose: string;
  /** Tags to filter by. */
  tags: Record<string, string>;
  /** Environment of every command. */
  env: Record<string, string>;
  /** Working directory of every command; the image's if absent. */
  cwd?: string | null;
  /** User of every command; the image's if absent. */
  user?: string | null;
  /** What it may use. */
  resources: Resources;
  /** How long one session may last. */
  session_timeout_ms?: number | null;
  /** How long a session lasts with no command alive and no connection open. */
  idle_timeout_ms?: number | null;
  on_idle?: OnIdle | null;
  /** Hooks. */
  hooks: Hooks;
  /** How long after its last use a snapshot is deleted. */
  snapshot_expires_ms?: number | null;
  /** How many snapshots are kept. */
  keep_last?: number | null;
  /** Paths to leave out of snapshots. */
  exclude: string[];
  /** Drives by the path they are mounted at. */
  mounts?: Record<string, Mount>;
  network?: Network | null;
  /** Secrets that its commands have a placeholder of. */
  secrets?: SecretUse[];
  /** Published ports. */
  ports?: Port[];
  /** Whether requests to published ports wake the sandbox, unless the port disables it. */
  wake_on_request?: boolean;
  /** Services: commands that run in every session. */
  services?: Service[];
  /** The guard: what to do about secrets and junk in snapshots. */
  guard: Guard;
  approvals?: ApprovalPolicy | null;
  /** What the guard found in what the last session wrote, when nothing of it is sealed until somebody decides. */
  findings?: Finding[];
  /** How long after its last use it is deleted. */
  expires_ms: number;
  /** When that is, as things stand. */
  expires_at: string;
  /** When it was created. */
  created_at: string;
  /** When its settings or state changed. */
  updated_at: string;
  /** When a session last began or ended. */
  used_at: string;
}

/** What a sandbox may reach, and where that comes from. */
export interface SandboxNetwork {
  /** What it may reach. */
  network: Network;
  /** Whether that is its own; it is the project's default otherwise. */
  own: boolean;
  bound?: Network | null;
}

/** What a sandbox uses at this moment. Asking never wakes it. */
export interface SandboxStats {
  /** The sandbox. */
  name: string;
  /** Its state. */
  state: State;
  /** When this was read, in milliseconds since 1970. */
  at_ms: number;
  /** The session; absent if none is under way. What follows is about it. */
  session?: string | null;
  usage?: LiveUsage | null;
}

/** What a key may do. */
export type Scope = "read" | "write" | "admin";

/** A named value of a project. */
export interface Secret {
  /** Its name, unique in the project. */
  name: string;
  /** The project it belongs to. */
  project: string;
  /** The number of the value in use. */
  version: number;
  /** The values that are kept, oldest first. */
  versions: SecretVersion[];
  /** The hosts that may have it when it is brokered. */
  hosts: string[];
  /** Parts of a request in which its placeholder is replaced when it is brokered. */
  places?: SecretPlace[];
  /** Only sandboxes that have all of these tags may use it. */
  tags: Record<string, string>;
  /** When it was first set. */
  created_at: string;
  /** When it was last set. */
  updated_at: string;
}

/** A secret that a session was given. */
export interface SecretGiven {
  /** The secret. */
  name: string;
  /** Which value of it. */
  version: number;
  /** How. */
  how: SecretHow;
}

/** How a session was given a secret. */
export type SecretHow = "brokered" | "env" | "file";

/** A part of a request. */
export type SecretPlace = "header" | "query" | "body";

/** A secret that a sandbox's commands have a placeholder of, which the network puts in its place. */
export interface SecretUse {
  /** The secret. */
  secret: string;
  /** The variable that holds the placeholder; named like the secret if absent. */
  env?: string | null;
}

/** One value of a secret. */
export interface SecretVersion {
  /** Its number. */
  version: number;
  /** When it was set. */
  created_at: string;
}

/** A command that belongs to a sandbox. */
export interface Service {
  /** Its name, unique in the sandbox. */
  name: string;
  /** Program and arguments. */
  argv: string[];
  /** Environment on top of the sandbox's. */
  env?: Record<string, string>;
  /** Working directory; the sandbox's if absent. */
  cwd?: string | null;
  /** User; the sandbox's if absent. */
  user?: string | null;
  /** The port it listens on: requests for it wait until it does. */
  port?: number | null;
  /** Whether it is restarted when it has ended. */
  restart?: Restart;
  /** Whether it is started with every session. */
  start?: boolean;
}

/** The state of a service. */
export type ServiceState = "stopped" | "starting" | "running" | "restarting" | "exited" | "failed";

/** A service and its state. */
export interface ServiceStatus {
  /** What it is meant to be. */
  service: Service;
  /** Its state. */
  state: ServiceState;
  /** Since when it runs. */
  since?: string | null;
  /** When it is started again. */
  restarts_at?: string | null;
  /** Its exit code, once it has exited. */
  exit_code?: number | null;
  /** Why it does not run. */
  problem?: string | null;
  /** How often it has failed in a row. */
  failures: number;
  /** Its command that runs, or the last one; its log is the service's. */
  command?: string | null;
}

/** One waking period of a sandbox. */
export interface Session {
  /** Its id. */
  id: string;
  /** Whose it is. */
  sandbox_id: string;
  /** The snapshot it started from; the image if absent. */
  from?: string | null;
  /** The generation it started from. */
  generation: number;
  /** When it began. */
  started_at: string;
  /** When it ended. */
  ended_at?: string | null;
  end?: SessionEnd | null;
  /** The snapshot made at its end. */
  snapshot?: string | null;
  /** What it used. */
  usage: Usage;
  changes?: SessionChanges | null;
  /** When it will be ended, unless extended. */
  deadline?: string | null;
  /** What the hooks did. */
  hooks: HookRun[];
  /** Whether `validate` found things as they were; absent without such a hook. */
  valid?: boolean | null;
  /** The secrets it was given. */
  secrets?: SecretGiven[];
  /** Why it started from files although memory was kept: files are as of the same generation, processes are gone. */
  fallback?: string | null;
}

/** What was changed in the root filesystem of a sandbox during a session: by commands, services and uploads. What every look at its files found is added up, so a file that is created and deleted later counts as both. */
export interface SessionChanges {
  /** How many paths were created. */
  created: number;
  /** How many paths were modified: content, mode, owner or times. */
  modified: number;
  /** How many paths were deleted. */
  deleted: number;
  /** What the created and modified files took on the disk. */
  bytes: number;
  /** Whether all changes were seen. Otherwise there were at least so many. */
  complete: boolean;
}

/** Why a session ended. */
export type SessionEnd = "stopped" | "paused" | "idle" | "timeout" | "rolled_back" | "deleted" | "interrupted" | "out_of_memory" | "out_of_disk" | "start_failed";

/** A change to a sandbox's guard. Absent fields stay as they are. */
export interface SetGuard {
  secrets?: OnSecret | null;
  junk?: OnJunk | null;
  large?: Size | null;
  /** What is junk, as globs: `.cache`, `** /*.iso`; replaces all there were. */
  globs?: string[] | null;
}

/** A change of what a sandbox may reach, at once. */
export interface SetNetwork {
  network?: Network | null;
}

/** A value to be set. */
export interface SetSecret {
  /** The value: text of 6 bytes to 64 KiB, without NUL. */
  value: string;
  /** The hosts that may have it when it is brokered, like `api.example.com` and `*.example.com`; as before if absent. */
  hosts?: string[] | null;
  /** Where in a request its placeholder is replaced when it is brokered, besides headers; as before if absent, and nowhere else at first. What is in a body can be read back wherever the host shows what it was sent. */
  places?: SecretPlace[] | null;
  /** Only sandboxes that have all of these tags may use it; as before if absent. */
  tags?: Record<string, string> | null;
}

/** A service to be declared, under the name in the path. */
export interface SetService {
  /** Program and arguments. */
  argv: string[];
  /** Environment on top of the sandbox's. */
  env?: Record<string, string>;
  /** Working directory; the sandbox's if absent. */
  cwd?: string | null;
  /** User; the sandbox's if absent. */
  user?: string | null;
  /** The port it listens on: requests for it wait until it does. */
  port?: number | null;
  /** Whether it is restarted when it has ended. */
  restart?: Restart;
  /** Whether it is started with every session, and now if the sandbox runs. */
  start?: boolean;
}

/** A signal: its number, or its name with or without `SIG`. */
export type Signal = number | string;

/** A signal to send. */
export interface SignalRequest {
  /** Which. */
  signal: Signal;
}

/** A size: bytes, or text like `512M`, `2G`. K, M, G and T are powers of 1024. */
export type Size = number | string;

/** A point a sandbox can be resumed or forked from. */
export interface Snapshot {
  /** Its id. */
  id: string;
  /** The name of the sandbox it was made of. It may be gone by now. */
  sandbox: string;
  /** That sandbox's id. */
  sandbox_id: string;
  /** The session it was made in. */
  session: string;
  /** That sandbox's generation with this snapshot. */
  generation: number;
  /** The snapshot before it. */
  parent?: string | null;
  /** How it came about. */
  kind: SnapshotKind;
  /** A label, for people. */
  label?: string | null;
  /** How many layers it stands on, the image's included. */
  layers: number;
  size?: SnapshotSize | null;
  memory?: SnapshotMemory | null;
  /** What the guard found in it and let pass, or took out of it. */
  findings?: Finding[];
  /** When it was made. */
  created_at: string;
  /** When it goes away, unless it is some sandbox's current one. */
  expires_at?: string | null;
}

/** The answer to deleting a snapshot. */
export interface SnapshotDeleted {
  /** What it freed. */
  freed_bytes: number;
}

/** How a snapshot came about. */
export type SnapshotKind = "stop" | "checkpoint" | "fork" | "before_rollback" | "recovered" | "pause" | "merge";

/** Memory of a machine, as part of a snapshot. */
export interface SnapshotMemory {
  /** How many captures it stands on, its own included. */
  layers: number;
  /** What of its size is memory: pages, devices and disks, those of captures it stands on included. */
  bytes?: number | null;
}

/** What a snapshot takes on the disk. */
export interface SnapshotSize {
  /** What was written since its parent. */
  own_bytes: number;
  /** What it has in common with others. */
  shared_bytes: number;
  /** What deleting it would free. */
  freed_if_deleted_bytes: number;
  /** About how much an export writes: the disk space of all its layers, those of its image included. Holes of sparse files are not counted here and are zeros in an export, whose `Content-Length` is exact. */
  export_bytes?: number;
}

/** Disk usage: of the key's project, or with an admin key of all. */
export interface SpaceUsage {
  /** The project that the sums are of; absent if they are of all. */
  project?: string | null;
  /** The size of the filesystem; for admin keys. */
  total_bytes?: number | null;
  /** What is free on it; for admin keys. */
  free_bytes?: number | null;
  /** What snapshots take. */
  snapshots_bytes: number;
  /** What drives take. */
  drives_bytes?: number;
  /** What images take, which all projects share; for admin keys. */
  images_bytes?: number | null;
  /** Disk space of quarantined files. */
  quarantine_bytes?: number;
  /** What sessions under way have written. */
  open_bytes: number;
  /** What records and logs of commands take. */
  commands_bytes?: number;
  /** Disk space of the trash, which becomes free when its grace period is over or space is needed. Not part of any other sum. */
  trash_bytes?: number;
}

/** A span of time: milliseconds, or text like `90s`, `15m`, `30d`. */
export type Span = number | string;

/** What a spending limit counts. */
export type SpendingKind = "cpu" | "time" | "network" | "cost";

/** What a run may use before somebody has to approve more. Meanwhile the run waits, and its sandbox stands still where its driver can do that. */
export interface SpendingLimit {
  /** What is counted. */
  what: SpendingKind;
  /** How much of it, over 0. */
  limit: number;
  /** How much more each approval allows; as much as `limit` if absent. */
  step?: number | null;
}

/** A start. The body may be empty. */
export interface Start {
  /** Fail with 412 unless the sandbox is at this generation. */
  expect_generation?: number | null;
}

/** A run to be started. */
export interface StartRun {
  /** Where it works. */
  place: RunPlace;
  command?: RunCommand | null;
  /** The repository it works on, for people. */
  repository?: string;
  /** Who answers for it; the key's project if empty. */
  owner?: string;
  /** What it is for. */
  purpose?: string;
  /** A kind of work, for people and filters. */
  class?: string;
  /** Runs with a higher number start first, between -100 and 100. */
  priority?: number;
  /** Commands that are held until somebody approves: patterns with `*` and `?` for the whole command line. They apply to commands started through the API in the sandbox of the run, not to what those start. */
  approve?: string[];
  /** Whether the first contact of the run with each host is held until somebody approves. */
  approve_hosts?: boolean;
  /** Hosts that need no approval: names, `*.example.com`, or addresses. */
  known_hosts?: string[];
  /** Secrets whose use is held: the first request that has it to each host, and each command that is given it. */
  approve_secrets?: string[];
  /** What the run may use before somebody has to approve more, at most one limit for each kind. */
  spending?: SpendingLimit[];
  on_accept?: AcceptRule | null;
  keep?: Span | null;
  timeout?: Span | null;
  /** How often the command is started again if it does not end with 0; at most 10. */
  retries?: number;
  heartbeat?: Span | null;
}

/** The state of a sandbox. */
export type State = "stopped" | "starting" | "running" | "paused" | "stopping" | "failed" | "deleted";

/** A stop, with what was decided about what the guard finds. An empty body will do. */
export interface Stop {
  /** Mask the values of secrets in the files that hold them. */
  redact?: boolean;
  /** Give up all that the session wrote. Goes with none of the others. */
  discard?: boolean;
  /** Large files and junk that are wanted, as globs. */
  promote?: string[];
  /** Files that do not enter the snapshot, as globs. */
  drop?: string[];
  /** Keep files that a failing disk put in doubt (`sync_failed`) as they can be read now. */
  accept_doubtful?: boolean;
}

/** The answer to a stop. */
export interface Stopped {
  /** The sandbox. */
  sandbox: Sandbox;
  session?: Session | null;
  snapshot?: Snapshot | null;
  usage?: Usage | null;
  /** What the guard found and let pass, or kept aside. */
  findings?: Finding[];
}

/** A command that may have written what was found. */
export interface Suspect {
  /** The command's id. */
  command: string;
  /** What was run. */
  argv: string[];
  /** Why it is named. */
  because: Because;
}

/** Takes chosen files that a sandbox made or changed since it was forked. */
export interface TakeArtifacts {
  /** Globs of the paths; `/` is everything. */
  only: string[];
}

/** The size of a terminal. */
export interface TermSize {
  /** Columns. */
  cols: number;
  /** Rows. */
  rows: number;
}

/** A condition on a text. */
export type TextMatch = {
  /** Equal to this text. */
  exact: string;
} | {
  /** With this prefix. */
  prefix: string;
} | {
  /** Matching this regular expression. */
  regex: string;
};

/** A token that was just made. */
export interface Token {
  /** What to send as `Authorization: Bearer …`. */
  token: string;
  /** The project it acts for, as those clients write it. */
  project: string;
  /** The team it belongs to, as those clients write it. */
  team: string;
}

/** The deleted sandboxes. */
export interface TrashEmptied {
  /** How many sandboxes. */
  sandboxes: number;
}

/** A sandbox in the trash. */
export interface TrashItem {
  /** Its id. */
  id: string;
  /** What it was called. The name is free. */
  name: string;
  /** When it was deleted. */
  deleted_at: string;
  /** Whether it expired, and nobody asked for it. */
  expired: boolean;
  /** How many snapshots went with it. */
  snapshots: number;
  /** What deleting it for good frees. */
  freed_if_deleted_bytes: number;
  /** How long it stays at least, unless space is needed. */
  stays_for_ms: number;
}

/** Everything connected with a sandbox by forks and snapshots. */
export interface Tree {
  /** Sandboxes. */
  sandboxes: Sandbox[];
  /** Snapshots. */
  snapshots: Snapshot[];
  /** What has become of each fork. Those that were deleted are listed while they are in the trash. */
  forks?: TreeFork[];
}

/** A fork in a lineage. */
export interface TreeFork {
  /** Its id. */
  id: string;
  /** Its name. */
  name: string;
  /** The name of its origin. */
  origin: string;
  /** What has become of it. */
  fate: ForkFate;
  /** What deleting it for good would free. */
  freed_if_deleted_bytes: number;
  /** Whether it is in the trash. */
  in_trash?: boolean;
}

/** What a running sandbox would lose if its host went down now. */
export interface Unsaved {
  /** Files that were created, modified or deleted. */
  files: number;
  /** Disk space of the created and modified ones. */
  bytes: number;
  /** When that was looked at: after the last command that ended, or later. */
  as_of: string;
}

/** A change to a sandbox's settings. Absent fields stay as they are. */
export interface UpdateSandbox {
  /** The image to start from if there is no snapshot: `host`, a name, or a registry reference. */
  image?: string | null;
  /** The isolation backend: `container` or `microvm`. Changed from the next session on; a sandbox that is paused has to be stopped first. */
  driver?: string | null;
  class?: Class | null;
  /** Whether a stop makes a snapshot. */
  persistent?: boolean | null;
  /** The owner, for people. */
  owner?: string | null;
  /** The purpose, for people. */
  purpose?: string | null;
  expires?: Span | null;
  /** Tags to filter by; replaces the list. */
  tags?: Record<string, string> | null;
  /** Environment of every command; replaces all variables. */
  env?: Record<string, string> | null;
  /** Working directory of every command; null for the image's. */
  cwd?: string | null;
  /** User of every command; null for the image's. */
  user?: string | null;
  /** CPUs, fractions allowed. */
  vcpus?: number | null;
  memory?: Size | null;
  /** Processes and threads. */
  pids?: number | null;
  disk?: Size | null;
  session_timeout?: Span | null;
  idle_timeout?: Span | null;
  on_idle?: OnIdle | null;
  hooks?: Hooks | null;
  snapshot_expires?: Span | null;
  /** How many snapshots are kept, the current one included; null to keep all. */
  keep_last?: number | null;
  /** Paths to leave out of snapshots, as globs from the root: `tmp/**`. */
  exclude?: string[] | null;
  /** Drives by the path they are mounted at, from the next session on: at most four; replaces all there were. A fork has none but these. */
  mounts?: Record<string, Mount> | null;
  network?: Network | null;
  /** Secrets that its commands have a placeholder of, which the network puts in its place; replaces all there were. */
  secrets?: SecretUse[] | null;
  /** Published ports; replaces the list. */
  ports?: Port[] | null;
  /** Whether requests to published ports wake the sandbox, unless the port disables it. */
  wake_on_request?: boolean | null;
  /** Services: commands that run in every session; replaces the list. */
  services?: Service[] | null;
  guard?: SetGuard | null;
  approvals?: ApprovalPolicy | null;
}

/** Changes of a webhook. What is absent stays as it is. */
export interface UpdateWebhook {
  /** Where events are sent. */
  url?: string | null;
  /** Which events. */
  events?: string[] | null;
  /** Whether private addresses may be dialled; needs an admin key. */
  allow_private?: boolean | null;
  /** Whether the receiver may answer approvals. `true`, and another address of a webhook that may, need a key that may approve, and end all links that were sent before. */
  answers?: boolean | null;
  /** Whether anything is sent. One that is enabled again continues where it was. */
  enabled?: boolean | null;
}

/** What a session used. */
export interface Usage {
  /** CPU time really used. */
  active_cpu_ms: number;
  /** Wall time. */
  wall_ms: number;
  /** The most memory at one time. */
  memory_peak_bytes: number;
  /** Bytes received from outside. */
  network_in_bytes: number;
  /** Bytes sent outside. */
  network_out_bytes: number;
  /** Processes that the kernel killed because the sandbox was out of memory. Known of containers; those inside a microVM show in the `end` of their commands. */
  oom_kills?: number;
}

/** How a value is written. */
export type ValueEncoding = "plain" | "json" | "url" | "base64" | "hex";

/** The outcome. */
export type Verdict = "allowed" | "denied" | "cut" | "failed";

/** A webhook, without its secrets. */
export interface Webhook {
  /** Its id. */
  id: string;
  /** Where events are sent. */
  url: string;
  /** Which events. */
  events: string[];
  /** Whether private, loopback and link-local addresses may be dialled. */
  allow_private: boolean;
  /** Whether the receiver may answer approvals. */
  answers?: boolean;
  /** The id of the key that allowed that. Links work for as long as it may approve. */
  answers_allowed_by?: string | null;
  /** How many secrets deliveries are signed with: 1, or 2 during a rotation. */
  secrets: number;
  /** When it was made. */
  created_at: string;
  /** Whether events are sent. */
  enabled: boolean;
  /** Why nothing is sent. */
  disabled_reason?: string | null;
  /** Since when nothing is sent. */
  disabled_at?: string | null;
  /** Since when deliveries fail, if they do. */
  failing_since?: string | null;
  /** The last attempts, the newest first. */
  deliveries: WebhookDelivery[];
}

/** An attempt to deliver an event. */
export interface WebhookDelivery {
  /** The event's id. */
  event: string;
  /** Its kind. */
  kind: string;
  /** When. */
  at: string;
  /** Which attempt it was. */
  attempt: number;
  /** Whether the receiver took it. */
  delivered: boolean;
  /** What the receiver answered. */
  status?: number | null;
  /** Why it was not delivered. */
  error?: string | null;
  /** How long it took. */
  duration_ms: number;
}

/** The calling key. */
export interface WhoAmI {
  /** The project the key acts for. */
  project: string;
  /** What it may do. */
  scope: Scope;
  /** Its id. */
  key: string;
  /** The server's version. */
  server_version: string;
}

/** Why a sandbox is in its state. */
export interface Why {
  /** Where it is. */
  state: State;
  /** Since when. */
  since: string;
  /** How it came into this state, as text for people; the following fields, too. */
  reason: string;
  /** What would wake it, or, while it runs, what would put it to sleep and when. */
  waking: string[];
  /** What keeps it awake now. */
  holding: string[];
  /** Other notices: memory that could not be used, a pause that was refused, a failure. */
  notices: string[];
}
