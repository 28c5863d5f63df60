// Tables sort by a click on a heading; flame graphs zoom to a frame; time lines say what was under the pointer.
for (const table of document.querySelectorAll("table.sorts")) {
  table.querySelectorAll("th button").forEach((button) => {
    button.onclick = () => {
      const head = button.parentElement;
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (entry) => {
        const cell = entry.rows[0].cells[head.cellIndex];
        return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
      };
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
      table.append(...[...table.tBodies].sort((a, b) => order(value(a), value(b))));
    };
  });
}
for (const flame of document.querySelectorAll(".flame")) {
  const readout = flame.previousElementSibling;
  flame.onclick = (event) => {
    const frame = event.target.closest(".n");
    if (!frame) return;
    for (const n of flame.querySelectorAll(".n")) n.classList.remove("path", "aside", "zoomed");
    for (let n = frame; n && n !== flame; n = n.parentElement.closest(".n")) {
      n.classList.add("path");
      for (const other of n.parentElement.children) if (other !== n) other.classList.add("aside");
    }
    frame.classList.replace("path", "zoomed");
    readout.textContent = frame.title;
  };
}
const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const bytes = (n) => {
  let unit = 0;
  for (; n >= 1024 && unit < 6; ++unit) n /= 1024;
  return (unit ? n.toFixed(2) : n) + " " + units[unit];
};
for (const svg of document.querySelectorAll(".chart svg")) {
  const points = JSON.parse(svg.dataset.points);
  const readout = svg.closest(".chart").previousElementSibling.querySelector(".readout");
  const at = svg.querySelector(".at");
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const [first, last] = [points[0][0], points.at(-1)[0]];
    const time = first + ((event.clientX - box.left) / box.width) * (last - first);
    const [t, live, held] = points.reduce((a, b) => (Math.abs(b[0] - time) < Math.abs(a[0] - time) ? b : a));
    readout.textContent = `at ${t.toPrecision(4)} s: ${bytes(live)} live, ${bytes(held)} held`;
    at.setAttribute("transform", `translate(${last > first ? ((t - first) / (last - first)) * 1000 : 0} 0)`);
    at.style.visibility = "visible";
  };
  svg.onpointerleave = () => (at.style.visibility = "hidden");
}
