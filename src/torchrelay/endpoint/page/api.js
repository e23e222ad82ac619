// Requests. The token is kept in this tab's session and sent in a header, never in an address.

const KEPT = "torchrelay-token";
const SECONDS = 10;

class Refused extends Error {}

async function ask(path, seconds = SECONDS) {
  const headers = {};
  const token = sessionStorage.getItem(KEPT);
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(path, {
    headers, cache: "no-store", credentials: "omit", redirect: "error",
    signal: AbortSignal.timeout(seconds * 1000),
  });
  if (answer.status === 401) throw new Refused(token ? "That token is not the right one." : "");
  if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 300) || answer.statusText);
  return answer.json();
}

function askForToken(why) {
  const door = byId("door");
  if (door.open) return;
  sessionStorage.removeItem(KEPT);
  if (why) byId("door-why").textContent = why;
  byId("token").value = "";
  door.showModal();
}

function watchDoor(then) {
  byId("door").addEventListener("cancel", (event) => event.preventDefault());
  byId("door").querySelector("form").addEventListener("submit", () => {
    sessionStorage.setItem(KEPT, byId("token").value.trim());
    byId("token").value = "";
    then();
  });
}
