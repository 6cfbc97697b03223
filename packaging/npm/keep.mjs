#!/usr/bin/env node
// Runs the program `keep` that is part of this package. Its exit code, its signals and its terminal are this process's.
import { spawn } from 'node:child_process'
import { constants } from 'node:os'
import { fileURLToPath } from 'node:url'

if (process.platform !== 'linux' || process.arch !== 'x64') {
  console.error(`keep: this package has the program for Linux on x86-64, not for ${process.platform} on ${process.arch}.`)
  console.error('The SDK of this package works here; run `keep serve` on a Linux machine and set SANDKEEP_URL and SANDKEEP_KEY.')
  process.exit(1)
}

const program = fileURLToPath(new URL('./keep-linux-x64', import.meta.url))
const keep = spawn(program, process.argv.slice(2), { stdio: 'inherit' })
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT', 'SIGUSR1', 'SIGUSR2', 'SIGWINCH']) {
  // A terminal sends SIGINT, SIGQUIT and SIGWINCH to both; the program does nothing twice for the second.
  process.on(signal, () => keep.kill(signal))
}
keep.on('error', (error) => {
  console.error(`keep: cannot run ${program}: ${error.message}`)
  process.exit(1)
})
keep.on('exit', (code, signal) => {
  process.exit(signal ? 128 + constants.signals[signal] : code)
})
