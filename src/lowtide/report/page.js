// The page is whole without this script. The data is compressed; the browser unpacks it itself.
const unpack = async (text) => {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
};

unpack(find("data").textContent).then((data) => {
  const timeline = new Timeline(data);
  new Values(data);
  new Choices(data, timeline);
  foldRows(find("peak"), find("all-alive"), 12);
  document.documentElement.dataset.ready = "yes";
});
