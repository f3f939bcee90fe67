// The door to the monitor: answers as they come, and a stream that is opened again until it is closed.

const ANSWER_MS = 30000, RETRY_MS = 1000, SILENCE_MS = 16000;

export async function ask(path, query = {}) {
  const answer = await fetch(`/api/${path}?${new URLSearchParams(query)}`, { signal: AbortSignal.timeout(ANSWER_MS) });
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(value.error ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
  return value;
}

// onChange gets every message; onLink whether the stream stands. One that is silent for longer than its signs of life
// allow counts as lost. Returns what closes it.
export function follow(job, afterVersion, onChange, onLink) {
  let stream = null, timer = null, version = afterVersion;
  const later = (action, ms) => { clearTimeout(timer); timer = setTimeout(action, ms); };
  const lose = () => { stream.close(); onLink(false); later(open, RETRY_MS); };
  function open() {
    stream = new EventSource(`/api/watch?${new URLSearchParams({ job, after: version })}`);
    later(lose, SILENCE_MS);
    stream.onopen = () => onLink(true);
    stream.onerror = lose;
    stream.onmessage = (message) => {
      later(lose, SILENCE_MS);
      const change = JSON.parse(message.data);
      version = change.version;
      onLink(true);
      onChange(change);
    };
  }
  open();
  return () => { clearTimeout(timer); stream.close(); };
}
